"""The tasks of `carma bench trace`: training scripts, their work, their arrivals, and what their logs say.

1. `tasks.csv` lists them with their class, in the published shares. The last three columns are of the stand-in that
   represents a task on a virtual GPU.
2. Arrivals are those of a published trace, scaled to the wanted span.
3. The number of steps follows from a short first run, so that every policy runs the same work.
"""

from __future__ import annotations

import csv
import random
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from carma.core.model.values import Record
from carma.errors import CarmaError
from carma.traces import find
from carma_lab.bench.gpu.trial_task import VirtualCard

SCRIPTS = Path(__file__).parent / "scripts"
STAND_IN = Path(__file__).with_name("virtual_training.py")
LEAST_STEPS = 10
SEED = "0"  # of every script
PROGRESS = re.compile(r"^step (\d+) .*?([\d.]+) s$", re.MULTILINE)


class Script(Record, frozen=True, kw_only=True):
    """A row of the table."""

    name: str
    kind: Literal["light", "medium", "heavy"]
    script: str
    arguments: str
    first_steps: int  # of the run that measures the time of a step
    memory_mib: int  # these three: of the stand-in
    sm: float
    dram: float


class Task(Record, frozen=True, kw_only=True):
    """A task of the trace. `steps` is None until it is measured."""

    name: str
    kind: str
    arrival_s: float
    steps: int | None = None


def _scripts() -> dict[str, Script]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = [msgspec.convert(row, Script, strict=False) for row in csv.DictReader(file)]
    return {row.name: row for row in rows}


TABLE = _scripts()


def planned(trace: str, tasks: int, span_s: float, seed: int) -> tuple[Task, ...]:
    """`tasks` scripts in random order, at the first arrivals of the trace, the last of them after `span_s`."""
    names = list(TABLE)
    random.Random(seed).shuffle(names)
    arrivals = [row.arrival_s for row in find(trace).tasks[:tasks]]
    first, last = arrivals[0], arrivals[-1]
    factor = span_s / (last - first) if last > first else 0.0
    return tuple(
        Task(name=name, kind=TABLE[name].kind, arrival_s=round((arrival - first) * factor, 1))
        for name, arrival in zip(names[:tasks], arrivals, strict=True)
    )


def command_of(name: str, steps: int, *, virtual: bool) -> tuple[str, ...]:
    """As a user would type it in the directory of the scripts."""
    row = TABLE[name]
    if virtual:
        shown = ("--memory-mib", str(row.memory_mib), "--sm", f"{row.sm:g}", "--dram", f"{row.dram:g}")
        return (sys.executable, str(STAND_IN), "--steps", str(steps), *shown)
    return (sys.executable, row.script, *shlex.split(row.arguments), "--steps", str(steps), "--seed", SEED)


def first_steps(name: str, *, virtual: bool) -> int:
    return LEAST_STEPS if virtual else TABLE[name].first_steps


def steps_for(seconds: float, ran_s: float, log: str) -> int:
    """Steps of a run of `seconds`, start-up included, by the log of a shorter one that took `ran_s`.

    The time of a step is that of the second half: the first steps choose algorithms and fill caches.
    """
    lines = progress(log)
    if len(lines) < 2:
        raise CarmaError("the script printed no progress, so its steps cannot be timed", log.strip()[-500:])
    steps, trained_s = lines[-1]
    half, half_s = lines[len(lines) // 2 - 1]
    step_s = max((trained_s - half_s) / (steps - half), 1e-6)
    rest_s = seconds - (ran_s - trained_s) - half_s
    return max(LEAST_STEPS, half + round(rest_s / step_s))


def progress(log: str) -> list[tuple[int, float]]:
    """The lines `step 40  loss 2.31  4.20 s` of a script: steps, and seconds of training."""
    return [(int(steps), float(seconds)) for steps, seconds in PROGRESS.findall(log)]


def trained_s(log: str) -> float | None:
    """Seconds of training without the start-up; None if the script printed none."""
    lines = progress(log)
    return lines[-1][1] if lines else None


def stand_in_seconds(steps: int) -> float:
    return steps * VirtualCard.STEP_S


def parts_of(tasks: Sequence[Task], parts: int) -> list[tuple[Task, ...]]:
    """Consecutive parts of about the same length."""
    edges = [round(len(tasks) * part / parts) for part in range(parts + 1)]
    return [tuple(tasks[begin:end]) for begin, end in pairwise(edges) if begin < end]
