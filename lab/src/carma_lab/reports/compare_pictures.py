"""Pictures of a comparison: bars relative to the first run, and a point of makespan and slowdown for each policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from carma_lab.reports.compare import Comparison, geo_mean
from carma_lab.reports.drawing import GRID, INK, PALETTE, SHEET, Picture, figure
from carma_lab.reports.figure_list import LINES

NAMES = ("bars", "cloud")
BARS = ("makespan_s", "completion_mean_s", "wait_mean_s", "slowdown_mean", "energy_j")
OVERALL = "geo-mean"
SHORT = 20  # maximum length of a name in a legend beside the picture
MARKERS = "osD^vPX*"
_HATCHES = ("", "////", "....", "xxxx")  # for more variants than colours


def pictures(comparison: Comparison) -> list[Picture]:
    about = "Makespan, completion, wait, slowdown and energy; the first run is 1"
    found = [Picture("bars", about, functools.partial(bars, comparison))]
    if len(_points(comparison)) > 1:
        about = "Makespan against mean slowdown, one point for each policy; lower left is better"
        found.append(Picture("cloud", about, functools.partial(cloud, comparison)))
    return found


def bars(comparison: Comparison) -> Any:
    """A panel for each figure, a group for each trace and the geometric mean, a bar for each variant."""
    fields = [field for field in BARS if any(_groups(comparison, field, label) for label in comparison.variants)]
    groups = [*comparison.traces, *([OVERALL] if len(comparison.traces) > 1 else [])]
    width = min(14.0, max(7.0, 1.2 + 0.22 * len(groups) * (len(comparison.variants) + 1)))
    made = figure(width, 0.9 + 1.75 * len(fields))
    every = made.subplots(len(fields), 1, sharex=True, squeeze=False)[:, 0]
    for axes, field in zip(every, fields, strict=True):
        _panel(axes, comparison, field, len(groups))
        axes.set_ylabel(next(line.label for line in LINES if line.field == field))
    every[-1].set_xticks(range(len(groups)), groups)
    made.align_ylabels()
    handles, names = every[0].get_legend_handles_labels()
    names[0] += " = 1"
    made.legend(handles, names, loc="outside upper left", ncols=_columns(names, width))
    return made


def _columns(names: Sequence[str], width: float) -> int:
    """Columns of a legend above a picture of this width in inches."""
    return max(1, int(width // (0.6 + 0.08 * max(map(len, names)))))


def _panel(axes: Any, comparison: Comparison, field: str, groups: int) -> None:
    each = 0.84 / len(comparison.variants)
    most = 1.0
    for place, label in enumerate(comparison.variants):
        heights = _groups(comparison, field, label)
        left = [group - 0.42 + each * (place + 0.5) for group in heights]
        style = {"color": _colour(place), "hatch": _HATCHES[place // len(PALETTE) % len(_HATCHES)]}
        axes.bar(left, list(heights.values()), each * 0.92, label=label, edgecolor=SHEET, linewidth=0.4, **style)
        most = max([most, *heights.values()])
        if place and groups * len(comparison.variants) <= 30:  # the first is 1
            for at, height in zip(left, heights.values(), strict=True):
                axes.annotate(f"{height:.2f}", (at, height), (0, 1.5), textcoords="offset points", ha="center",
                              fontsize=7)  # fmt: skip
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, most * 1.15)
    axes.grid(axis="x", visible=False)


def _groups(comparison: Comparison, field: str, label: str) -> dict[int, float]:
    """Heights by index of the group; unknown values have no bar."""
    values = [comparison.ratios[trace].get(label, {}).get(field) for trace in comparison.traces]
    if len(comparison.traces) > 1:
        values.append(comparison.overall[label][field])
    return {place: value for place, value in enumerate(values) if value is not None}


def _colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _points(comparison: Comparison) -> dict[str, tuple[float, float]]:
    """(makespan as a ratio, mean slowdown) of each variant, over all traces."""
    found = {}
    for label in comparison.variants:
        makespan = comparison.overall[label]["makespan_s"]
        slowdown = _mean_slowdown(comparison, label)
        if makespan is not None and slowdown is not None:
            found[label] = (makespan, slowdown)
    return found


def _mean_slowdown(comparison: Comparison, label: str) -> float | None:
    return geo_mean([ran[label]["slowdown_mean"] if label in ran else None for ran in comparison.values.values()])


def cloud(comparison: Comparison) -> Any:
    made = figure(7.2, 4.8)
    axes = made.subplots()
    for place, label in enumerate(comparison.variants):
        style = {"color": _colour(place), "marker": MARKERS[place % len(MARKERS)], "linestyle": "none"}
        if len(comparison.traces) > 1:
            single = _single(comparison, label)
            axes.plot(*single, alpha=0.35, markersize=4, zorder=2, **style)
        if label in (points := _points(comparison)):
            x, y = points[label]
            axes.plot([x], [y], markersize=9, markeredgecolor=SHEET, label=label, zorder=3, **style)
    axes.axvline(1.0, color=GRID, linewidth=1.0, zorder=1)
    longest = max(map(len, comparison.variants))
    axes.set_xlabel(f"makespan ({comparison.variants[0] if longest <= SHORT else 'the first run'} = 1)")
    axes.set_ylabel("mean slowdown (times the run alone)")
    several = len(comparison.traces) > 1
    axes.set_title(f"{', '.join(comparison.traces)}" + ("; large: geometric mean" if several else ""))
    axes.margins(0.12)
    if longest <= SHORT:
        made.legend(loc="outside right upper")
    else:  # a legend beside the picture would be too wide
        made.legend(loc="outside upper left", ncols=_columns(comparison.variants, 7.2))
    return made


def _single(comparison: Comparison, label: str) -> tuple[Sequence[float], Sequence[float]]:
    xs, ys = [], []
    for trace in comparison.traces:
        makespan = comparison.ratios[trace].get(label, {}).get("makespan_s")
        slowdown = comparison.values[trace].get(label, {}).get("slowdown_mean")
        if makespan is not None and slowdown is not None:
            xs.append(makespan)
            ys.append(slowdown)
    return xs, ys
