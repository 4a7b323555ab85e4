"""The demo's table: the figures of both runs, their change, and the published change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from carma.core.model.units import show_j, show_s
from carma.demo.figures import ReplayFigures, change_percent

# Abstract of arXiv 2508.19073 v2 and v3: the best collocation policy against exclusive GPUs, one workload.
PUBLISHED_PERCENT = {"makespan_s": -35.0, "energy_j": -15.0, "sm_active_mean": 54.0}

# Earlier names of fields in --json, which programs may still use.
OLD_NAMES = {
    "wait_mean_s": "waiting_mean_s",
    "wait_p95_s": "waiting_p95_s",
    "completion_mean_s": "turnaround_mean_s",
    "sm_active_mean": "sm_active",
}


def _energy(joules: float) -> str:
    """With one more digit than usual, because the table compares two runs."""
    return f"{joules / 3.6e6:.2f} kWh" if joules >= 3.6e6 else show_j(joules)


LINES: dict[str, tuple[str, Callable[[Any], str]]] = {  # field: label, and the text of a value
    "makespan_s": ("makespan", show_s),
    "wait_mean_s": ("mean wait", show_s),
    "wait_p95_s": ("p95 wait", show_s),
    "completion_mean_s": ("mean completion", show_s),
    "slowdown_mean": ("mean slowdown", lambda value: f"{value:.2f} x"),
    "ooms": ("out of memory", str),
    "sm_active_mean": ("SM activity", lambda value: f"{100 * value:.0f} %"),
    "energy_j": ("GPU energy", _energy),
}


class Row(NamedTuple):
    label: str
    exclusive: str
    collocated: str
    change: str
    published: str


def rows(exclusive: ReplayFigures, collocated: ReplayFigures) -> list[Row]:
    return [_row(field, getattr(exclusive, field), getattr(collocated, field)) for field in LINES]


def _row(field: str, before: float | None, after: float | None) -> Row:
    label, show = LINES[field]
    percents = (change_percent(before, after), PUBLISHED_PERCENT.get(field))
    values = ("-" if value is None else show(value) for value in (before, after))
    return Row(label, *values, *("" if percent is None else f"{percent:+.0f} %" for percent in percents))


def changes(exclusive: ReplayFigures, collocated: ReplayFigures) -> dict[str, float | None]:
    """The change of each figure, in percent."""
    return {field: change_percent(getattr(exclusive, field), getattr(collocated, field)) for field in LINES}


def with_old_names(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {**values, **{old: values[new] for new, old in OLD_NAMES.items() if new in values}}


def plain_table(header: Row, body: list[Row]) -> str:
    """Aligned columns: labels to the left, figures to the right, a line below the header."""
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    lines = []
    for row in [header, Row(*("-" * width for width in widths)), *body]:
        (label, first), *others = zip(row, widths, strict=True)
        lines.append("  ".join([label.ljust(first), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)
