"""Pictures of one run: the GPUs over time, distributions of wait, completion and slowdown, and a Gantt chart."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from carma_lab.reports.drawing import (
    BLUE,
    GREEN,
    INK,
    PURPLE,
    VERMILION,
    Picture,
    figure,
    legend_above,
    span_unit,
)
from carma_lab.reports.figure_list import title
from carma_lab.reports.gantt import gantt
from carma_lab.reports.summary import completions, slowdowns, waits
from carma_lab.runs.figures import quantile
from carma_lab.runs.record import Point, Run


class Curve(NamedTuple):
    field: str  # of Point
    label: str
    colour: str


class Panel(NamedTuple):
    label: str
    scale: float
    curves: tuple[Curve, ...]
    most: float | None = None  # end of the axis


PANELS = (
    Panel(
        "activity (%)",
        100.0,
        (
            Curve("sm_active", "SM activity", BLUE),
            Curve("dram_active", "DRAM activity", VERMILION),
            Curve("sm_occupancy", "SM occupancy", GREEN),
        ),
        100.0,
    ),
    Panel("memory (GiB)", 1 / 1024, (Curve("memory_mib", "used on a GPU", PURPLE),)),
    Panel("power (W)", 1.0, (Curve("power_w", "of a GPU", VERMILION),)),
    Panel("tasks", 1.0, (Curve("running", "running", BLUE), Curve("waiting", "waiting", VERMILION))),
)


NAMES = ("course", "spread", "gantt")


def pictures(run: Run) -> list[Picture]:
    """The pictures for which the run has data."""
    found = []
    if len(run.course) > 1:
        about = "Activity, memory and power of the GPUs, running and waiting tasks over time"
        found.append(Picture("course", about, functools.partial(course, run)))
    about = "Cumulative distributions of completion, wait and slowdown"
    found.append(Picture("spread", about, functools.partial(spread, run)))
    if any(task.attempts for task in run.tasks):
        found.append(Picture("gantt", "Tasks on each GPU over time", functools.partial(gantt, run)))
    return found


def course(run: Run) -> Any:
    """Means over all GPUs. Values that were not measured have no panel."""
    panels = [panel for panel in PANELS if any(_known(run.course, curve.field) for curve in panel.curves)]
    unit_s, unit = span_unit(run.course[-1].at_s)
    hours = [point.at_s / unit_s for point in run.course]
    made = figure(9.0, 0.8 + 1.75 * len(panels))
    every = made.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        curves = [curve for curve in panel.curves if _known(run.course, curve.field)]
        for curve in curves:
            values = [_scaled(getattr(point, curve.field), panel.scale) for point in run.course]
            axes.plot(hours, values, drawstyle="steps-pre", color=curve.colour, label=curve.label, linewidth=1.3)
        axes.set_ylabel(panel.label)
        axes.set_ylim(0, panel.most)
        legend_above(axes, len(curves))
    every[-1].yaxis.get_major_locator().set_params(integer=True)  # the last one counts tasks
    every[0].set_title(title(run.about), pad=18)
    every[-1].set_xlabel(f"time ({unit})")
    every[-1].set_xlim(0, hours[-1])
    made.align_ylabels()
    return made


def _known(points: Sequence[Point], field: str) -> bool:
    return any(getattr(point, field) is not None for point in points)


def _scaled(value: float | None, scale: float) -> float:
    return math.nan if value is None else value * scale


def spread(run: Run) -> Any:
    """Cumulative distributions; p95 is at the height 0.95. Slowdown only if known."""
    completion_s, wait_s = completions(run.tasks), waits(run.tasks)
    unit_s, unit = span_unit(max([*completion_s, *wait_s]))
    drawn = [
        ("completion", [value / unit_s for value in completion_s], unit, BLUE),
        ("wait", [value / unit_s for value in wait_s], unit, VERMILION),
        ("slowdown", slowdowns(run.tasks), "times the run alone", GREEN),
    ]
    drawn = [entry for entry in drawn if entry[1]]
    made = figure(3.0 * len(drawn), 3.2)
    every = made.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for axes, (label, values, unit, colour) in zip(every, drawn, strict=True):
        least = 1.0 if label == "slowdown" and min(values) >= 1.0 else 0.0
        cumulative(axes, values, least, color=colour)
        axes.set_xlabel(f"{label} ({unit})")
        axes.set_xlim(left=least)
        axes.set_ylim(0, 1.02)
        for share in (0.5, 0.95):
            _mark(axes, quantile(values, share), share)
    every[0].set_ylabel("share of tasks")
    made.suptitle(title(run.about), x=0.01, ha="left", fontsize=10)
    return made


def _mark(axes: Any, value: float, share: float) -> None:
    """p50 or p95, with its label on the side with more room."""
    least, most = axes.get_xlim()
    right = value > least + 0.6 * (most - least)
    axes.plot([value], [share], marker="o", markersize=4, color=INK)
    axes.annotate(
        f"p{100 * share:.0f}: {value:.3g}",
        (value, share),
        xytext=(-7, 3) if right else (7, -10),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
    )


def cumulative(axes: Any, values: Sequence[float], least: float, **style: object) -> None:
    ordered = sorted(values)
    heights = [place / len(ordered) for place in range(len(ordered) + 1)]
    axes.plot([min(least, ordered[0]), *ordered], heights, drawstyle="steps-post", linewidth=1.6, **style)
