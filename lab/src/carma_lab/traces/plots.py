"""Pictures of a trace: arrivals, run times and memory of its tasks, with a colour for each class.

matplotlib is imported only when drawing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from carma.errors import Refused
from carma.traces.schema import Trace, TraceTask
from carma_lab.traces.task_classes import CLASSES, Class, class_of
from gpumemnet.directories import make_folder
from gpumemnet.output_file import MARK, write_file

COLOURS: dict[Class, str] = {"light": "#93c5fd", "medium": "#1d4ed8", "heavy": "#b45309"}
MOST_BINS = 60
NARROWEST = 1.5  # minimum factor between the middle and the ends of an axis of sizes
FILES = ("arrivals.png", "durations.png", "memory.png")


def drawing() -> Any:
    """pyplot for drawing into files; Refused if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        hint = "Run pip install matplotlib, or omit --out."
        raise Refused("matplotlib is not installed, so pictures cannot be drawn", hint) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(trace: Trace, out: Path) -> list[Path]:
    """Writes arrivals.png, durations.png and memory.png into the directory."""
    pyplot = drawing()
    make_folder(out)
    drawn = (
        _arrivals(pyplot, trace),
        _sizes(pyplot, trace, lambda task: task.seconds / 60, "run time alone (minutes)"),
        _sizes(pyplot, trace, lambda task: task.memory_mib / 1024, "memory on each GPU (GiB)"),
    )
    return [_save(pyplot, figure, out / file) for figure, file in zip(drawn, FILES, strict=True)]


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=150, metadata={"Software": MARK})
    pyplot.close(figure)
    write_file(str(path), target.getvalue())
    return path


def _by_class(trace: Trace, figure: Callable[[TraceTask], float]) -> dict[Class, list[float]]:
    found: dict[Class, list[float]] = {kind: [] for kind in CLASSES}
    for task in trace.tasks:
        found[class_of(task)].append(figure(task))
    return found


def _arrivals(pyplot: Any, trace: Trace) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    hours = _by_class(trace, lambda task: task.arrival_s / 3600)
    _stacked(axes, hours, np.linspace(0, max(trace.tasks[-1].arrival_s / 3600, 1e-3), _bins(trace) + 1))
    axes.set_xlabel("time (hours)")
    axes.set_ylabel("arrivals (tasks)")
    total = axes.twinx()
    total.step([task.arrival_s / 3600 for task in trace.tasks], range(1, len(trace.tasks) + 1), where="post",
               color="#374151", linewidth=1.2)  # fmt: skip
    total.set_ylabel("arrived so far (tasks)")
    total.set_ylim(bottom=0)
    total.spines["top"].set_visible(False)
    axes.set_title(_title(trace), loc="left")
    return figure


def _sizes(pyplot: Any, trace: Trace, figure_of: Callable[[TraceTask], float], label: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    found = _by_class(trace, figure_of)
    every = [value for values in found.values() for value in values]
    least, most = min(every) * 0.99, max(every) * 1.01
    middle = math.sqrt(least * most)  # similar tasks are not spread over the whole width
    least, most = min(least, middle / NARROWEST), max(most, middle * NARROWEST)
    _stacked(axes, found, np.geomspace(least, most, _bins(trace) + 1))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    if most < 10 * least:  # the axis may contain no power of ten, which would be its only label
        axes.xaxis.set_minor_formatter("{x:,.3g}")
    else:
        axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(label)
    axes.set_ylabel("tasks")
    axes.set_title(_title(trace), loc="left")
    return figure


def _title(trace: Trace) -> str:
    count = len(trace.tasks)
    return f"{trace.name}: {count:,} {'task' if count == 1 else 'tasks'}"


def _bins(trace: Trace) -> int:
    return min(MOST_BINS, max(10, 2 * math.isqrt(len(trace.tasks))))


def _stacked(axes: Any, found: dict[Class, list[float]], bins: Any) -> None:
    kinds = [kind for kind in CLASSES if found[kind]]
    axes.hist([found[kind] for kind in kinds], bins=bins, stacked=True, color=[COLOURS[kind] for kind in kinds],
              label=kinds)  # fmt: skip
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(kinds))
    axes.spines[["top", "right"]].set_visible(False)
