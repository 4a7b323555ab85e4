"""The pictures of the study, in the style of the reports (carma_lab/reports/drawing.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from carma_lab.bench.paper.claims import GOODPUT, NO_CAP
from carma_lab.reports.drawing import PALETTE, Picture, figure

MARKS = "osD^vPX*<>"
BARS = (("makespan", "makespan"), ("completion", "mean completion"), ("run", "mean run time"), ("energy", "energy"))


def pictures(parts: Mapping[str, Any]) -> list[Picture]:
    """One for each part that has one. The docstring of the function that draws it is the caption."""
    makers: dict[str, Callable[[Any], Any]] = {"curves": curves, "tables": bars, "seeds": seeds, "philly": philly}
    return [
        Picture(f"paper-{make.__name__}", make.__doc__ or "", functools.partial(make, parts[part]))
        for part, make in makers.items()
        if part in parts
    ]


def curves(part: Any) -> Any:
    """Makespan over mean run time: goodput's curve over the slowdown cap, every baseline's point, the limit"""
    traces = part["traces"]
    drawn = figure(10.0, 1.2 + 3.4 * ((len(traces) + 1) // 2))
    every = drawn.subplots((len(traces) + 1) // 2, 2 if len(traces) > 1 else 1, squeeze=False).ravel()
    for axes, (trace, one) in zip(every, traces.items(), strict=False):
        _curve(axes, one)
        axes.set_title(f"{trace}, {part['gpus']} GPUs")
        axes.set_xlabel("mean run time (exclusive = 1)")
        axes.set_ylabel("makespan (exclusive = 1)")
    for axes in every[len(traces) :]:
        axes.set_visible(False)
    handles, names = every[0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside lower center", ncols=4)
    return drawn


def _curve(axes: Any, one: Any) -> None:
    line = [(point["run"], point["makespan"], point["cap"]) for point in one["curve"]]
    line.sort(key=lambda point: point[:2])  # two caps may come to the same
    axes.plot([at for at, _, _ in line], [high for _, high, _ in line], color=PALETTE[0], marker=".", label=GOODPUT,
              zorder=3)  # fmt: skip
    for at, high, cap in line:
        axes.annotate("no cap" if cap is None else f"{cap:g}", (at, high), (3, 3), textcoords="offset points",
                      fontsize=6, color=PALETTE[0])  # fmt: skip
    bounds = [(point["run"], point["bound"]) for point in one["curve"] if "bound" in point]  # older files have none
    if bounds:
        axes.plot(*zip(*sorted(bounds), strict=True), color=PALETTE[2], linewidth=1.0, marker=".", markersize=3,
                  label="the limit at each cap")  # fmt: skip
    for place, (name, point) in enumerate(one["points"].items()):
        colour = PALETTE[1 + place % (len(PALETTE) - 1)]
        axes.plot([point["run"]], [point["makespan"]], marker=MARKS[place % len(MARKS)], linestyle="none",
                  color=colour, label=name, zorder=2)  # fmt: skip
    axes.axhline(one["bound"], color=PALETTE[2], linewidth=1.0, linestyle=(0, (4, 3)), label="the limit")
    axes.margins(0.1)


def bars(part: Any) -> Any:
    """Makespan, completion, run time and energy of each variant, exclusive GPUs = 1; published: black lines"""
    drawn = figure(10.0, 9.0)
    groups = {one["group"] for one in part["variants"]}
    compared = "published" if "published" in groups else "baselines"
    shown = [one for one in part["variants"] if one["group"] in (compared, "ours")]
    every = drawn.subplots(len(BARS), 1, sharex=True)
    for axes, (field, label) in zip(every, BARS, strict=True):
        heights = [one["mean"][field] or 0.0 for one in shown]
        tints = [PALETTE[1 if one["group"] == "ours" else 0] for one in shown]
        axes.bar(range(len(shown)), heights, 0.75, color=tints)
        for place, one in enumerate(shown):
            axes.annotate(f"{heights[place]:.2f}", (place, heights[place]), (0, 1.5), textcoords="offset points",
                          ha="center", fontsize=7)  # fmt: skip
            published = one.get("published", {}).get(field)
            if published is not None:
                axes.plot([place - 0.4, place + 0.4], [published, published], color="black", linewidth=1.6)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylim(0, max([1.0, *heights]) * 1.15)
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
    names = [one["name"] for one in shown]
    every[-1].set_xticks(range(len(shown)), names, rotation=40, ha="right", rotation_mode="anchor")
    title = f"{part['gpus']} GPUs, geometric means over the traces, exclusive = 1"
    every[0].set_title(title + ("; black: published" if compared == "published" else ""))
    return drawn


def seeds(part: Any) -> Any:
    """Makespan over seeds with the measured spread of true rates: mean, p5 to p95, least and most"""
    drawn = figure(8.0, 4.0)
    axes = drawn.subplots()
    group = part["groups"][0]
    for place, (name, one) in enumerate(group["variants"].items()):
        shift = (place - (len(group["variants"]) - 1) / 2) * 0.12
        at = [number + shift for number in range(len(group["traces"]))]
        bands = [one["traces"][trace]["makespan"] for trace in group["traces"]]
        means = [band["mean"] for band in bands]
        colour = PALETTE[place % len(PALETTE)]
        axes.vlines(at, [band["least"] for band in bands], [band["most"] for band in bands], colour, linewidth=0.8)
        axes.vlines(at, [band["p05"] for band in bands], [band["p95"] for band in bands], colour, linewidth=3.5)
        axes.plot(at, means, linestyle="none", marker=MARKS[place % len(MARKS)], color=colour, label=name, zorder=3)
    axes.set_xticks(range(len(group["traces"])), group["traces"])
    axes.set_xlim(-0.5, len(group["traces"]) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("makespan (exclusive = 1)")
    axes.set_title(f"{group['gpus']} GPUs, {part['seeds']} seeds: mean, p5 to p95 (thick), least and most")
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return drawn


def philly(part: Any) -> Any:
    """Makespan on windows of the Philly trace, a point for each window, and the limit"""
    drawn = figure(1.5 + 3.2 * len(part["sizes"]), 4.6)
    every = drawn.subplots(1, len(part["sizes"]), sharey=True, squeeze=False)[0]
    for axes, size in zip(every, part["sizes"], strict=True):
        names = [name for name in size["rows"][0]["policies"] if name not in (GOODPUT, NO_CAP)] + [GOODPUT, NO_CAP]
        for place, name in enumerate(names):
            values = [row["policies"][name]["makespan"] for row in size["rows"]]
            colour = PALETTE[0] if name in (GOODPUT, NO_CAP) else PALETTE[4 % len(PALETTE)]
            axes.plot(
                [place] * len(values), values, linestyle="none", marker="o", markersize=4, alpha=0.6, color=colour
            )
        bounds = [row["bound"] for row in size["rows"]]
        axes.plot([len(names)] * len(bounds), bounds, linestyle="none", marker="_", markersize=12, color=PALETTE[2])
        axes.set_xticks(
            range(len(names) + 1), [*names, "the limit"], rotation=40, ha="right", rotation_mode="anchor", fontsize=7
        )
        axes.set_title(f"{size['gpus']} GPUs, {size['tasks']} tasks each")
    every[0].set_ylabel("makespan (exclusive = 1)")
    return drawn
