"""The results file of `carma bench trace`, which is complete at every moment.

One record for each task alone and one for each run of a policy. A record is added when its run is complete, so a
measurement can be split into pieces, on one machine after another: each record names where it was made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from carma import __version__
from carma.core.model.values import Record
from carma.errors import Usage
from carma_lab.bench.results_file import write
from carma_lab.bench.trace.tasks import Task
from carma_lab.runs.figures import Ran, figures
from carma_lab.runs.record import Run

FILE = "trace.json"
NO_MANAGER = "none"  # every task is started when it arrives, by hand
FRESH, KNOWN = "fresh", "known"


class Place(Record, frozen=True, kw_only=True):
    """Where and when a record was made."""

    gpu: str
    driver: str
    date: str
    carma: str = __version__


class Shown(Record, frozen=True, kw_only=True):
    """What the GPUs showed over a run: means over time and GPUs; power and energy of all GPUs. None: not measured."""

    seconds: float
    energy_j: float | None = None
    power_w: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    dram_active: float | None = None
    gpu_util: float | None = None
    memory_mib: float | None = None
    memory_max_mib: int | None = None


class SoloRun(Record, frozen=True, kw_only=True):
    """A task alone on the GPU, without a manager."""

    name: str
    ran_s: float
    trained_s: float | None
    shown: Shown
    place: Place


class TaskRow(Record, frozen=True, kw_only=True):
    """A task of a run. Times count from the first arrival. `ran_s` is the time of its last attempt."""

    name: str
    arrival_s: float
    started_s: float | None
    ended_s: float
    ran_s: float | None
    trained_s: float | None
    outcome: str
    attempts: int
    ooms: int
    memory_mib: int | None = None  # observed by the daemon

    @property
    def completion_s(self) -> float:
        return self.ended_s - self.arrival_s


class TraceRun(Record, frozen=True, kw_only=True):
    """A complete run, or a part of one under `exclusive`. `settings` are those that are not shipped defaults."""

    policy: str
    home: str
    settings: dict[str, str] = {}
    repetition: int = 1
    part: int = 1
    parts: int = 1
    makespan_s: float
    shown: Shown
    tasks: tuple[TaskRow, ...]
    place: Place

    @property
    def case(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What is repeated."""
        return self.policy, self.home, tuple(sorted(self.settings.items()))


class Plan(Record, frozen=True, kw_only=True):
    """The work, equal for all runs of a file."""

    trace: str
    span_s: float
    seconds: float
    seed: int
    virtual: bool
    tasks: tuple[Task, ...]


class Results(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    command: str
    machine: dict[str, Any]
    torch: str | None
    energy_from: str | None
    plan: Plan
    alone: list[SoloRun] = []
    runs: list[TraceRun] = []

    def alone_s(self) -> dict[str, float]:
        """Duration of each task alone: its own record, else the mean of its runs under `exclusive`."""
        found = {one.name: one.ran_s for one in self.alone}
        for task in self.plan.tasks:
            ran = [
                row.ran_s
                for run in self.runs
                if run.policy == "exclusive"
                for row in run.tasks
                if row.name == task.name and row.outcome == "succeeded" and row.ran_s is not None
            ]
            if ran and task.name not in found:
                found[task.name] = sum(ran) / len(ran)
        return found

    def has(self, policy: str, home: str, settings: dict[str, str], repetition: int, part: int, parts: int) -> bool:
        wanted = (policy, home, settings, repetition, part, parts)
        return any(
            (run.policy, run.home, run.settings, run.repetition, run.part, run.parts) == wanted for run in self.runs
        )


GPU_MEANS = ("sm_active_mean", "sm_occupancy_mean", "dram_active_mean", "memory_mib_mean", "power_w_mean")


def joined(first: Run, second: Run, by_s: float, arrivals: Sequence[float]) -> Run:
    """The recorded runs of two parts as one. The second began after `by_s`; its tasks arrived at `arrivals`."""
    last = max(task.task for task in first.tasks)
    later = [
        replace(
            task,
            task=task.task + last,
            arrival_s=arrival,
            ended_s=task.ended_s + by_s,
            attempts=tuple(_shifted(one, by_s) for one in task.attempts),
        )
        for task, arrival in zip(second.tasks, arrivals, strict=True)
    ]
    tasks, both = (*first.tasks, *later), (first.figures, second.figures)
    means = {name: weighted([(getattr(one, name), one.makespan_s) for one in both]) for name in GPU_MEANS}
    made = figures(tasks, took_s=None, energy_j=total([one.energy_j for one in both]), **means)
    return replace(first, tasks=tasks, figures=made)


def _shifted(one: Ran, by_s: float) -> Ran:
    started_at = None if one.started_at is None else one.started_at + by_s
    return replace(one, placed_at=one.placed_at + by_s, started_at=started_at, ended_at=one.ended_at + by_s)


def total(values: Sequence[float | None]) -> float | None:
    """None if one is not known, or if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    """Mean of values with their weights; None if one is not known."""
    known = [(value, weight) for value, weight in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)


def read(folder: Path) -> Results:
    path = folder / FILE
    try:
        members = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        members.pop("results", None)  # worked out from the others
        return msgspec.convert(members, Results)
    except (OSError, ValueError) as error:
        raise Usage(f"{path} is not a file of carma bench trace: {error}", "Name the directory with --out.") from error


def save(results: Results, folder: Path, summary: list[dict[str, Any]]) -> None:
    write({**msgspec.to_builtins(results), "results": summary}, folder / FILE)


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
