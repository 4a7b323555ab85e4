"""Gantt chart: one bar for each attempt on each of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from carma_lab.reports.drawing import BLUE, GREEN, INK, ORANGE, PURPLE, SHEET, SKY, VERMILION, figure, span_unit
from carma_lab.reports.figure_list import title
from carma_lab.runs.figures import TaskRun
from carma_lab.runs.record import Run

MOST_TASKS = 200  # more bars cannot be distinguished
WIDTH_IN = 9.0
_DARK = (BLUE, VERMILION, GREEN)  # with white letters
_WHITE, _BLACK = "#ffffff", "#111111"  # letters on bars, independent of the page's colours


class Bar(NamedTuple):
    task: int
    user: str
    gpu: int
    lane: int  # row within the GPU
    begin_s: float
    end_s: float
    outcome: str


def bars(tasks: Sequence[TaskRun]) -> list[Bar]:
    """Bars by GPU and time, each in the first free lane of its GPU. Times since the first arrival."""
    start_s = min(task.arrival_s for task in tasks)
    found = sorted(
        (gpu, one.placed_at - start_s, one.ended_at - start_s, task.task, task.user, one.outcome)
        for task in tasks
        for one in task.attempts
        for gpu in one.gpus
    )
    free_at: dict[int, list[float]] = {}
    made = []
    for gpu, begin_s, end_s, number, user, outcome in found:
        lanes = free_at.setdefault(gpu, [])
        lane = next((place for place, free in enumerate(lanes) if free <= begin_s), len(lanes))
        lanes[lane : lane + 1] = [end_s]
        made.append(Bar(number, user, gpu, lane, begin_s, end_s, outcome))
    return made


def gantt(run: Run) -> Any:
    tasks = sorted(run.tasks, key=lambda task: (task.arrival_s, task.task))[:MOST_TASKS]
    every = bars(tasks)
    gpus = sorted({bar.gpu for bar in every})
    lanes = {gpu: 1 + max(bar.lane for bar in every if bar.gpu == gpu) for gpu in gpus}
    bottoms, height = {}, 0.0
    for gpu in gpus:
        bottoms[gpu] = height
        height += lanes[gpu] + 0.6
    length_s = max(bar.end_s for bar in every)
    unit_s, unit = span_unit(length_s)
    made = figure(WIDTH_IN, min(14.0, max(2.6, 1.3 + 0.19 * height)))
    axes = made.subplots()
    colours = _colours(tasks)
    for bar in every:
        _draw(axes, bar, bottoms[bar.gpu] + bar.lane, unit_s, length_s, colours)
    axes.set_yticks([bottoms[gpu] + lanes[gpu] / 2 - 0.5 for gpu in gpus], [f"GPU {gpu}" for gpu in gpus])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.8, -0.8)
    axes.set_xlim(0, length_s / unit_s)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time ({unit})")
    part = "" if len(tasks) == len(run.tasks) else f"; the first {len(tasks)} of {len(run.tasks):,} tasks"
    axes.set_title(title(run.about) + part, pad=24)
    _legend(axes, every, colours)
    return made


def _colours(tasks: Sequence[TaskRun]) -> dict[str, str]:
    """One colour for each user if there are few; otherwise one for all."""
    users = sorted({task.user for task in tasks})
    usable = (BLUE, GREEN, PURPLE, SKY, ORANGE)
    return dict(zip(users, usable if 1 < len(users) <= len(usable) else [BLUE] * len(users), strict=False))


def _draw(axes: Any, bar: Bar, row: float, unit_s: float, length_s: float, colours: dict[str, str]) -> None:
    colour = colours[bar.user] if bar.outcome == "succeeded" else VERMILION if _oom(bar) else ORANGE
    hatch = "" if bar.outcome == "succeeded" else "////" if _oom(bar) else "...."
    left, width = bar.begin_s / unit_s, (bar.end_s - bar.begin_s) / unit_s
    axes.barh(row, width, 0.92, left=left, color=colour, hatch=hatch, edgecolor=SHEET, linewidth=0.5)
    if bar.outcome != "succeeded":  # often too short to be visible
        axes.plot([left], [row], marker="x", markersize=5, markeredgewidth=1.4, color=INK, clip_on=False)
    letters = str(bar.task)
    if (bar.end_s - bar.begin_s) / length_s * WIDTH_IN * 0.88 > 0.06 + 0.065 * len(letters):
        ink = _WHITE if colour in _DARK else _BLACK
        axes.text(left + width / 2, row, letters, ha="center", va="center_baseline", fontsize=6.5, color=ink)


def _oom(bar: Bar) -> bool:
    return bar.outcome == "out_of_memory"


def _legend(axes: Any, every: Sequence[Bar], colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    several = len(set(colours.values())) > 1
    entries = [Patch(color=colour, label=user or "no user") for user, colour in colours.items()] if several else []
    if not several:
        entries.append(Patch(color=BLUE, label="succeeded (the number is the task's)"))
    if any(_oom(bar) for bar in every):
        entries.append(Patch(facecolor=VERMILION, hatch="////", edgecolor=SHEET, label="out of memory (x)"))
    if any(not _oom(bar) and bar.outcome != "succeeded" for bar in every):
        entries.append(Patch(facecolor=ORANGE, hatch="....", edgecolor=SHEET, label="ended otherwise (x)"))
    axes.legend(handles=entries, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(entries), fontsize=8)
