"""Pictures of a trace: arrivals, run times and memory of its tasks, with a colour for each class."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from carma.core.model.units import show_count
from carma.traces.schema import Trace, TraceTask
from carma_lab.reports.drawing import Picture, figure, legend_above
from carma_lab.traces.task_classes import CLASSES, Class, class_of

COLOURS: dict[Class, str] = {"light": "#93c5fd", "medium": "#1d4ed8", "heavy": "#b45309"}
MOST_BINS = 60
NARROWEST = 1.5  # minimum factor between the middle and the ends of an axis of sizes
NAMES = ("arrivals", "durations", "memory")


def pictures(trace: Trace) -> list[Picture]:
    def durations(task: TraceTask) -> float:
        return task.seconds / 60

    def memory(task: TraceTask) -> float:
        return task.memory_mib / 1024

    return [
        Picture("arrivals", "Arrivals over time", partial(_arrivals, trace)),
        Picture("durations", "Run times", partial(_sizes, trace, durations, "run time alone (minutes)")),
        Picture("memory", "Memory on each GPU", partial(_sizes, trace, memory, "memory on each GPU (GiB)")),
    ]


def _by_class(trace: Trace, figure: Callable[[TraceTask], float]) -> dict[Class, list[float]]:
    found: dict[Class, list[float]] = {kind: [] for kind in CLASSES}
    for task in trace.tasks:
        found[class_of(task)].append(figure(task))
    return found


def _arrivals(trace: Trace) -> Any:
    drawn = figure(9, 4)
    axes = drawn.subplots()
    hours = _by_class(trace, lambda task: task.arrival_s / 3600)
    _stacked(axes, hours, np.linspace(0, max(trace.tasks[-1].arrival_s / 3600, 1e-3), _bins(trace) + 1))
    axes.set_xlabel("time (hours)")
    axes.set_ylabel("arrivals (tasks)")
    total = axes.twinx()
    total.step([task.arrival_s / 3600 for task in trace.tasks], range(1, len(trace.tasks) + 1), where="post",
               color="#374151", linewidth=1.2)  # fmt: skip
    total.set_ylabel("arrived so far (tasks)")
    total.set_ylim(bottom=0)
    total.spines["right"].set_visible(True)
    total.grid(visible=False)
    axes.set_title(_title(trace))
    return drawn


def _sizes(trace: Trace, figure_of: Callable[[TraceTask], float], label: str) -> Any:
    drawn = figure(9, 4)
    axes = drawn.subplots()
    found = _by_class(trace, figure_of)
    every = [value for values in found.values() for value in values]
    least, most = min(every) * 0.99, max(every) * 1.01
    middle = math.sqrt(least * most)  # similar tasks are not spread over the whole width
    least, most = min(least, middle / NARROWEST), max(most, middle * NARROWEST)
    _stacked(axes, found, np.geomspace(least, most, _bins(trace) + 1))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    # The axis may contain no power of ten, which would be its only label.
    axes.xaxis.set_minor_formatter("{x:,.3g}" if most < 10 * least else "")
    axes.set_xlabel(label)
    axes.set_ylabel("tasks")
    axes.set_title(_title(trace))
    return drawn


def _title(trace: Trace) -> str:
    return f"{trace.name}: {show_count(len(trace.tasks), 'task')}"


def _bins(trace: Trace) -> int:
    return min(MOST_BINS, max(10, 2 * math.isqrt(len(trace.tasks))))


def _stacked(axes: Any, found: dict[Class, list[float]], bins: Any) -> None:
    kinds = [kind for kind in CLASSES if found[kind]]
    axes.hist([found[kind] for kind in kinds], bins=bins, stacked=True, color=[COLOURS[kind] for kind in kinds],
              label=kinds)  # fmt: skip
    axes.yaxis.get_major_locator().set_params(integer=True)
    legend_above(axes, len(kinds))
