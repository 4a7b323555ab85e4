"""Imports a window of the public Philly trace.

The file has arrivals, run times, numbers of GPUs and clusters of the jobs, but neither models nor memory. These are
drawn from a table of tasks: the shortest jobs become light tasks, the longest heavy ones, in the requested shares.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import math
import random
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from carma.core.model.values import Record
from carma.errors import BadTrace
from carma.traces.reader import lines_of
from carma.traces.schema import Trace, TraceTask, start_within
from carma.traces.table import Table
from carma_lab.traces.task_classes import CLASSES, Class, Shares, Urn, split

WANTED = ("timestamp", "duration", "num_gpus", "cluster")
USER_LETTERS = 6
SOURCE = (
    "Arrivals, GPUs, clusters and run times of jobs: Microsoft's Philly traces (GitHub msr-fiddle/philly-traces, "
    "CC-BY-4.0); Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads, ATC'19."
)
_HINT = (
    f"The columns are: {', '.join(WANTED)}; others are ignored. The file is philly.csv of the Pollux authors "
    "(GitHub petuum/adaptdl, branch osdi21-artifact)."
)


class Job(NamedTuple):
    at: datetime.datetime
    seconds: float
    gpus: int
    cluster: str


class Window(Record, frozen=True, kw_only=True):
    """Jobs from `start` (default: the first) for `days` or `tasks`, of one cluster, with up to `gpus_most` GPUs."""

    start: datetime.datetime | None = None
    days: float | None = None
    tasks: int | None = None
    cluster: str | None = None
    gpus_most: int = 4

    def spelled(self) -> str:
        flags = {
            "--start": f"{self.start:%Y-%m-%dT%H:%M:%S}" if self.start else None,
            "--days": f"{self.days:g}" if self.days is not None else None,
            "--tasks": self.tasks,
            "--cluster": self.cluster,
            "--gpus-most": self.gpus_most,
        }
        return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)


class MapRules(Record, frozen=True, kw_only=True):
    """Rules for the tasks. `durations`: run times of the jobs, or of the drawn tasks."""

    shares: Shares = Shares()
    durations: Literal["philly", "task"] = "philly"
    seed: int = 0


class Imported(NamedTuple):
    trace: Trace
    dropped: int  # jobs of the window with more than `gpus_most` GPUs


def read_jobs(path: Path) -> list[Job]:
    """All jobs in the order of arrival; jobs of one second in the order of the file."""
    lines = lines_of(path, "Give the path of the Philly CSV file.")
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if len(rows) < 2:
        raise BadTrace(f"{path.name} has no jobs", _HINT)
    header = [cell.strip() for cell in rows[0][1].split(",")]
    missing = [column for column in WANTED if column not in header]
    if missing:
        raise BadTrace(f"{path.name} line {rows[0][0]}: no column {', '.join(missing)}", _HINT)
    places = [header.index(column) for column in WANTED]
    jobs = [_job(f"{path.name} line {number}", line, len(header), places) for number, line in rows[1:]]
    return sorted(jobs, key=lambda job: job.at)


def _job(where: str, line: str, width: int, places: list[int]) -> Job:
    cells = next(csv.reader([line])) if '"' in line else line.split(",")
    if len(cells) != width:
        raise BadTrace(f"{where}: {len(cells)} values for {width} columns")
    at, duration, gpus, cluster = (cells[place].strip() for place in places)
    return Job(_moment(where, at), _above_zero(where, "duration", duration), _count(where, gpus), cluster)


def _moment(where: str, text: str) -> datetime.datetime:
    with contextlib.suppress(ValueError):
        at = datetime.datetime.fromisoformat(text)
        if at.tzinfo is None:
            return at
    raise BadTrace(f"{where}: timestamp: {text!r} is not a time like 2017-10-09 07:01:55")


def _above_zero(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadTrace(f"{where}: {column}: {text!r} is not a number above 0")
    return value


def _count(where: str, text: str) -> int:
    value = _above_zero(where, "num_gpus", text)
    if not value.is_integer():
        raise BadTrace(f"{where}: num_gpus: {text} is not a whole number")
    return int(value)


def import_philly(path: Path, window: Window, rules: MapRules, table: Table) -> Imported:
    jobs, dropped = _within(path.name, read_jobs(path), window)
    kinds = _kinds(jobs, rules.shares)
    urn = Urn(table, random.Random(rules.seed))
    tasks = tuple(
        _task(job, urn.draw(kind, job.gpus), jobs[0].at, rules) for job, kind in zip(jobs, kinds, strict=True)
    )
    command = (
        f"carma trace import philly {path.name} {window.spelled()} --shares {rules.shares} "
        f"--durations {rules.durations} --seed {rules.seed}"
    )
    more = "1 job with more GPUs is" if dropped == 1 else f"{dropped:,} jobs with more GPUs are"
    source = f"Made by: {command}. {more} left out. {SOURCE} The models are not part of it; they are "
    source += f"drawn from {table.name}: {table.source}"
    return Imported(Trace(name=path.name, tasks=tasks, source=source), dropped)


def _within(name: str, jobs: list[Job], window: Window) -> tuple[list[Job], int]:
    start = window.start or jobs[0].at
    lasts_s = math.inf if window.days is None else window.days * 86_400
    kept: list[Job] = []
    dropped = 0
    for job in jobs:
        if window.tasks is not None and len(kept) == window.tasks:
            break
        if 0 <= (job.at - start).total_seconds() < lasts_s and window.cluster in (None, job.cluster):
            if job.gpus <= window.gpus_most:
                kept.append(job)
            else:
                dropped += 1
    if not kept:
        raise BadTrace(f"{name}: no job matches ({window.spelled()})", _contents(jobs))
    return kept, dropped


def _contents(jobs: list[Job]) -> str:
    clusters = Counter(job.cluster for job in jobs).most_common()
    named = ", ".join(f"{cluster} ({count:,})" for cluster, count in clusters)
    return f"Its jobs came from {jobs[0].at} to {jobs[-1].at}. Clusters: {named}."


def _kinds(jobs: list[Job], shares: Shares) -> list[Class]:
    """Class of each job by run time; the shortest are light."""
    ranked = sorted(range(len(jobs)), key=lambda place: jobs[place].seconds)
    counts = zip(CLASSES, split(shares, len(jobs)), strict=True)
    by_rank = [kind for kind, count in counts for _ in range(count)]
    kinds: list[Class] = ["light"] * len(jobs)
    for place, kind in zip(ranked, by_rank, strict=True):
        kinds[place] = kind
    return kinds


def _task(job: Job, drawn: TraceTask, first: datetime.datetime, rules: MapRules) -> TraceTask:
    seconds = job.seconds if rules.durations == "philly" else drawn.seconds
    return msgspec.structs.replace(
        drawn,
        arrival_s=(job.at - first).total_seconds(),
        gpus=job.gpus,
        busy_gpus=drawn.busy_gpus if job.gpus == drawn.gpus else 0,
        seconds=seconds,
        start_s=drawn.start_s if seconds >= drawn.seconds else start_within(drawn.start_s, seconds),
        user=job.cluster[:USER_LETTERS],
    )
