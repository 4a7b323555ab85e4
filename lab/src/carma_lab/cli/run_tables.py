"""A run on the terminal: figures, distributions, users, the course over time."""

from __future__ import annotations

from collections.abc import Sequence

from carma.cli.output import Column, heading, print_facts, print_table
from carma.cli.wording import gpu_hours, percent
from carma.core.model.units import show_j, show_mib, show_s
from carma_lab.reports.fairness import Fairness
from carma_lab.reports.figure_list import conditions, title
from carma_lab.reports.summary import Spread, Summary, thinned
from carma_lab.runs.record import Point

ROWS = 10  # of the table over time


def show(summary: Summary, course: Sequence[Point]) -> None:
    heading(title(summary.about))
    print_facts(_facts(summary))
    print()
    _spreads(summary)
    if summary.fairness is not None:
        print()
        _users(summary.fairness)
    if course:
        print()
        _course(course)


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
    known = [
        (f"{label} {percent(value)} %")
        for label, value in (
            ("SM", figures.sm_active_mean),
            ("occupancy", figures.sm_occupancy_mean),
            ("DRAM", figures.dram_active_mean),
        )
        if value is not None
    ]
    if figures.memory_mib_mean is not None:
        known.append(f"{show_mib(figures.memory_mib_mean)} held")
    return ", ".join(known) + " on each GPU" if known else ""


def _energy(summary: Summary) -> str:
    figures = summary.figures
    if figures.energy_j is None:
        return ""
    power = "" if figures.power_w_mean is None else f", {figures.power_w_mean:.0f} W on each GPU"
    return show_j(figures.energy_j) + power


def _spreads(summary: Summary) -> None:
    rows = [
        _spread_row("wait", summary.wait_s, in_seconds=True),
        _spread_row("run", summary.run_s, in_seconds=True),
        _spread_row("completion", summary.completion_s, in_seconds=True),
        _spread_row("slowdown", summary.slowdown, in_seconds=False),
    ]
    titles = ("MEAN", "P50", "P95", "MAX", "TASKS")
    print_table([Column("OF TASKS"), *(Column(name, right=True) for name in titles)], rows)


def _spread_row(label: str, spread: Spread | None, *, in_seconds: bool) -> list[str]:
    if spread is None:
        return [label, "-", "-", "-", "-", "0"]
    values = (spread.mean, spread.p50, spread.p95, spread.max)
    return [label, *(show_s(value) if in_seconds else f"{value:.2f} x" for value in values), f"{spread.count:,}"]


def _users(fairness: Fairness) -> None:
    titles = ("TASKS", "GPU TIME", "WAIT", "COMPLETION", "SLOWDOWN", "FINISH-TIME", "WORST")
    rows = [
        [
            user.user or "-",
            f"{user.tasks:,}",
            show_s(user.gpu_s),
            show_s(user.wait_mean_s),
            show_s(user.completion_mean_s),
            _ratio(user.slowdown_mean),
            _ratio(user.finish_time_mean),
            _ratio(user.finish_time_max),
        ]
        for user in fairness.users
    ]
    print_table([Column("USER", flexible=True, most=16), *(Column(name, right=True) for name in titles)], rows)
    jain = [
        f"{label} {value:.3f}"
        for label, value in (
            ("finish-time", fairness.jain_finish_time),
            ("slowdown", fairness.jain_slowdown),
            ("GPU time", fairness.jain_service),
        )
        if value is not None
    ]
    print_facts([("Jain's index", ", ".join(jain))])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _course(course: Sequence[Point]) -> None:
    titles = ("SM %", "OCC %", "DRAM %", "MEMORY", "W", "RUN", "WAIT")
    rows = [
        [
            show_s(point.at_s),
            percent(point.sm_active),
            percent(point.sm_occupancy),
            percent(point.dram_active),
            show_mib(point.memory_mib),
            "-" if point.power_w is None else f"{point.power_w:.0f}",
            f"{point.running:.1f}",
            f"{point.waiting:.1f}",
        ]
        for point in thinned(course, ROWS)
    ]
    print_table([Column("UNTIL", right=True), *(Column(name, right=True) for name in titles)], rows)
