"""Cuts a trace, and scales its arrivals, durations and number of tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from carma.errors import BadTrace
from carma.traces.schema import Trace, TraceTask, start_within


def cut(trace: Trace, from_s: float, to_s: float) -> Trace:
    """The tasks that arrive from `from_s` on and before `to_s`; the first of them arrives at 0."""
    kept = [task for task in trace.tasks if from_s <= task.arrival_s < to_s]
    if not kept:
        last = trace.tasks[-1].arrival_s
        hint = f"Its tasks arrive between {_s(trace.tasks[0].arrival_s)} and {_s(last)} s; give --from and --to."
        until = f"to {_s(to_s)} s" if math.isfinite(to_s) else "s on"
        raise BadTrace(f"{trace.name}: no task arrives from {_s(from_s)} {until}", hint)
    begin = kept[0].arrival_s
    tasks = tuple(msgspec.structs.replace(task, arrival_s=round(task.arrival_s - begin, 3)) for task in kept)
    how = f"carma trace cut --from {from_s:.15g}" + (f" --to {to_s:.15g}" if math.isfinite(to_s) else "")
    return _changed(trace, tasks, how)


def _s(seconds: float) -> str:
    """`32400`, `99999999`, `0.5`: without trailing zeros."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def scale(trace: Trace, rate: float = 1.0, length: float = 1.0, tasks: int | None = None) -> Trace:
    """Scales the arrival rate by `rate` and durations by `length`; `tasks` in total: the first ones, or repetitions.

    A repetition starts one mean gap after the last arrival, so the arrival rate stays.
    """
    count = len(trace.tasks) if tasks is None else tasks
    kept = itertools.islice(_endless(trace.tasks), count)
    changed = tuple(
        msgspec.structs.replace(
            task,
            arrival_s=round(at / rate, 3),
            seconds=task.seconds * length,
            start_s=task.start_s if length >= 1.0 else start_within(task.start_s, task.seconds * length),
        )
        for at, task in kept
    )
    how = f"carma trace scale --rate {rate:g} --length {length:g} --tasks {count}"
    return _changed(trace, changed, how)


def _endless(tasks: tuple[TraceTask, ...]) -> Iterator[tuple[float, TraceTask]]:
    first, last = tasks[0].arrival_s, tasks[-1].arrival_s
    mean_gap_s = (last - first) / (len(tasks) - 1) if len(tasks) > 1 else 0.0
    for turn in itertools.count():
        for task in tasks:
            yield task.arrival_s + turn * (last - first + mean_gap_s), task


def _changed(trace: Trace, tasks: tuple[TraceTask, ...], how: str) -> Trace:
    return Trace(name=trace.name, tasks=tasks, source=f"Made of {trace.name} by: {how}. {trace.source}")
