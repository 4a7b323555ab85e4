"""A run as tables for the terminal and the HTML page."""

from __future__ import annotations

from carma.core.model.units import show_s
from carma_lab.reports.drawing import Picture
from carma_lab.reports.fairness import Fairness
from carma_lab.reports.figure_list import LINES, conditions, shown, times, title, value_of
from carma_lab.reports.html_page import Table, page, picture_section, section
from carma_lab.reports.summary import Summary


def run_page(found: Summary, drawn: list[Picture]) -> str:
    figures = [["figure", "value"], *([line.label, shown(line, value_of(found.figures, line))] for line in LINES)]
    sections = [section("Figures", figures), section("Distributions", spreads(found))]
    if len(found.outcomes) > 1 or len(found.attempts) > 1:
        kinds = dict.fromkeys([*found.outcomes, *found.attempts])
        rows = [
            [kind.replace("_", " "), str(found.outcomes.get(kind, 0)), str(found.attempts.get(kind, 0))]
            for kind in kinds
        ]
        sections.append(section("Outcomes", [["outcome", "tasks", "attempts"], *rows]))
    if found.fairness is not None:
        note = "Wait, completion, slowdown and finish-time fairness are means over the tasks of a user."
        if indices := jain_indices(found.fairness):
            note += f" Jain's index: {indices}."
        sections.append(section("Users", users(found.fairness), note))
    return page(title(found.about), [conditions(found.about)], [*sections, *map(picture_section, drawn)])


def spreads(found: Summary) -> Table:
    rows = [["of tasks", "mean", "p50", "p95", "max", "tasks"]]
    for label, spread, show in (
        ("wait", found.wait_s, show_s),
        ("run", found.run_s, show_s),
        ("completion", found.completion_s, show_s),
        ("slowdown", found.slowdown, times),
    ):
        if spread is None:
            rows.append([label, "-", "-", "-", "-", "0"])
        else:
            values = (spread.mean, spread.p50, spread.p95, spread.max)
            rows.append([label, *map(show, values), f"{spread.count:,}"])
    return rows


def users(fairness: Fairness) -> Table:
    rows = [["user", "tasks", "GPU time", "wait", "completion", "slowdown", "finish-time", "worst"]]
    for user in fairness.users:
        times_s = (user.gpu_s, user.wait_mean_s, user.completion_mean_s)
        ratios = (user.slowdown_mean, user.finish_time_mean, user.finish_time_max)
        shown_ratios = ("-" if value is None else f"{value:.2f}" for value in ratios)
        rows.append([user.user or "-", f"{user.tasks:,}", *map(show_s, times_s), *shown_ratios])
    return rows


def jain_indices(fairness: Fairness) -> str:
    indices = {
        "finish-time": fairness.jain_finish_time,
        "slowdown": fairness.jain_slowdown,
        "GPU time": fairness.jain_service,
    }
    return ", ".join(f"{label} {value:.3f}" for label, value in indices.items() if value is not None)
