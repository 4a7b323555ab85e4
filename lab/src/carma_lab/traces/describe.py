"""Description of a trace: number, arrivals, durations and memory of its tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from carma.core.model.units import show_count, show_mib
from carma.core.model.values import Record
from carma.traces.schema import Trace
from carma_lab.traces.task_classes import CLASSES, class_of

MOST_USERS = 8  # listed by name


class Spread(Record, frozen=True, kw_only=True):
    least: float
    p25: float
    median: float
    mean: float
    p75: float
    p90: float
    p99: float
    most: float


class Described(Record, frozen=True, kw_only=True):
    """`gaps_s` is None for a trace of one task. Classes follow from the rows (task_classes.py)."""

    trace: str
    source: str
    tasks: int
    names: int  # number of different names
    span_s: float  # from the first arrival to the last
    rate_per_hour: float | None
    gaps_s: Spread | None
    seconds: Spread
    memory_mib: Spread
    gpu_hours: float
    gpus: dict[int, int]  # tasks by number of requested GPUs
    two_gpus: int
    classes: dict[str, int]
    users: dict[str, int]


def describe(trace: Trace) -> Described:
    arrivals = [task.arrival_s for task in trace.tasks]
    span_s = arrivals[-1] - arrivals[0]
    gpus = Counter(task.gpus for task in trace.tasks)
    kinds = Counter(class_of(task) for task in trace.tasks)
    users = Counter(task.user for task in trace.tasks if task.user)
    return Described(
        trace=trace.name,
        source=trace.source,
        tasks=len(trace.tasks),
        names=len({task.name for task in trace.tasks}),
        span_s=span_s,
        rate_per_hour=(len(arrivals) - 1) / span_s * 3600 if span_s else None,
        gaps_s=_spread(np.diff(arrivals).tolist()) if len(arrivals) > 1 else None,
        seconds=_spread([task.seconds for task in trace.tasks]),
        memory_mib=_spread([task.memory_mib for task in trace.tasks]),
        gpu_hours=trace.gpu_seconds / 3600,
        gpus=dict(sorted(gpus.items())),
        two_gpus=gpus[2],
        classes={kind: kinds[kind] for kind in CLASSES},
        users=dict(sorted(users.items())),
    )


def _spread(values: Sequence[float]) -> Spread:
    shares = {"least": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "most": 1}
    found = np.quantile(values, list(shares.values())).tolist()
    return Spread(mean=float(np.mean(values)), **dict(zip(shares, found, strict=True)))


def facts(described: Described) -> list[tuple[str, str]]:
    """Labels and texts for the terminal."""
    shares = {kind: f"{count:,} ({100 * count / described.tasks:.0f} %)" for kind, count in described.classes.items()}
    classes = ", ".join(f"{kind} {share}" for kind, share in shares.items())
    gpus = ", ".join(f"{count:,} on {show_count(gpus, 'GPU')}" for gpus, count in described.gpus.items())
    rate = f", {described.rate_per_hour:,.1f} an hour" if described.rate_per_hour is not None else ""
    return [
        ("trace", described.trace),
        ("tasks", f"{described.tasks:,}, {described.names:,} different"),
        ("GPUs", f"{gpus}; {described.gpu_hours:,.1f} GPU-hours"),
        ("arrivals", f"over {_time(described.span_s)}{rate}"),
        ("gaps", _line(described.gaps_s, _time)),
        ("run times", _line(described.seconds, _time)),
        ("memory", _line(described.memory_mib, show_mib)),
        ("classes", classes),
        ("users", _users(described.users)),
    ]


def _line(spread: Spread | None, show: Callable[[float], str]) -> str:
    if spread is None:
        return ""
    words = ("median", "mean", "p25", "p75", "p90", "p99")
    parts = [f"{word} {show(getattr(spread, word))}" for word in words]
    return ", ".join([*parts, f"from {show(spread.least)} to {show(spread.most)}"])


def _time(seconds: float) -> str:
    """A time in its usual unit."""
    if seconds < 600:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.2f} h"


def _users(users: dict[str, int]) -> str:
    if not users:
        return ""
    named = ", ".join(f"{user} {count:,}" for user, count in Counter(users).most_common(MOST_USERS))
    return f"{len(users)}: {named}" + (", …" if len(users) > MOST_USERS else "")
