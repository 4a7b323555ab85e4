"""A run on the terminal: figures, distributions, users, the course over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carma.cli.output import Column, heading, print_facts, print_table
from carma.cli.wording import gpu_hours, percent
from carma.core.model.units import show_j, show_mib, show_s
from carma_lab.reports.figure_list import conditions, title
from carma_lab.reports.pages import Table, jain_indices, spreads, users
from carma_lab.reports.summary import Summary, thinned
from carma_lab.runs.record import Point

ROWS = 10  # of the table over time


def show(summary: Summary, course: Sequence[Point]) -> None:
    heading(title(summary.about))
    print_facts(_facts(summary))
    print()
    _print(spreads(summary))
    if summary.fairness is not None:
        print()
        _print(users(summary.fairness), flexible=True, most=16)
        print_facts([("Jain's index", jain_indices(summary.fairness))])
    if course:
        print()
        _course(course)


def _print(table: Table, **first: Any) -> None:
    """`first`: of the first column."""
    label, *titles = (title.upper() for title in table[0])
    print_table([Column(label, **first), *(Column(title, right=True) for title in titles)], table[1:])


def _facts(summary: Summary) -> list[tuple[str, str]]:
    figures = summary.figures
    tasks = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in summary.outcomes.items())
    ooms = f"{figures.ooms:,}, {figures.innocent_ooms:,} of them innocent" if figures.ooms else "none"
    wasted = f"{gpu_hours(figures.wasted_gpu_s)} in attempts without a result" if figures.wasted_gpu_s else ""
    return [
        ("with", conditions(summary.about)),
        ("makespan", show_s(figures.makespan_s)),
        ("tasks", f"{figures.tasks:,}: {tasks}"),
        ("out of memory", ooms),
        ("wasted", wasted),
        ("activity", _activity(summary)),
        ("energy", _energy(summary)),
    ]


def _activity(summary: Summary) -> str:
    """Means over all GPUs and the whole run."""
    figures = summary.figures
    shares = {
        "SM": figures.sm_active_mean,
        "occupancy": figures.sm_occupancy_mean,
        "DRAM": figures.dram_active_mean,
    }
    known = [f"{label} {percent(value)} %" for label, value in shares.items() if value is not None]
    if figures.memory_mib_mean is not None:
        known.append(f"{show_mib(figures.memory_mib_mean)} held")
    return ", ".join(known) + " on each GPU" if known else ""


def _energy(summary: Summary) -> str:
    figures = summary.figures
    if figures.energy_j is None:
        return ""
    power = "" if figures.power_w_mean is None else f", {figures.power_w_mean:.0f} W on each GPU"
    return show_j(figures.energy_j) + power


def _course(course: Sequence[Point]) -> None:
    rows = [["until", "SM %", "occ %", "DRAM %", "memory", "W", "run", "wait"]]
    for point in thinned(course, ROWS):
        activity = (point.sm_active, point.sm_occupancy, point.dram_active)
        power = "-" if point.power_w is None else f"{point.power_w:.0f}"
        tasks = (f"{point.running:.1f}", f"{point.waiting:.1f}")
        rows.append([show_s(point.at_s), *map(percent, activity), show_mib(point.memory_mib), power, *tasks])
    _print(rows, right=True)
