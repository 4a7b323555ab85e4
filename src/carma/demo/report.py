"""The demo's table: exclusive and collocated side by side, with what was published next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from carma.core.model.units import show_j, show_s
from carma.demo.figures import Figures, change_percent

# Abstract of arXiv 2508.19073 v2 and v3: the best collocation policy against exclusive GPUs, one workload.
PUBLISHED_PERCENT = {"makespan_s": -35.0, "energy_j": -15.0, "sm_active_mean": 54.0}


# As --json had them before they were named as `carma simulate` names them: programs may still look for these.
OLD_NAMES = {
    "wait_mean_s": "waiting_mean_s",
    "wait_p95_s": "waiting_p95_s",
    "completion_mean_s": "turnaround_mean_s",
    "sm_active_mean": "sm_active",
}


class Line(NamedTuple):
    field: str
    label: str
    show: Callable[[Any], str]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _energy(joules: float) -> str:
    """Two runs are compared, so with one digit more than elsewhere."""
    return f"{joules / 3.6e6:.2f} kWh" if joules >= 3.6e6 else show_j(joules)


LINES = (
    Line("makespan_s", "makespan", show_s),
    Line("wait_mean_s", "mean wait", show_s),
    Line("wait_p95_s", "p95 wait", show_s),
    Line("completion_mean_s", "mean completion", show_s),
    Line("slowdown_mean", "mean slowdown", lambda value: f"{value:.2f} x"),
    Line("ooms", "out of memory", str),
    Line("sm_active_mean", "SM activity", _share),
    Line("energy_j", "GPU energy", _energy),
)


class Row(NamedTuple):
    """One line of the table as text."""

    label: str
    exclusive: str
    collocated: str
    change: str
    published: str


def rows(exclusive: Figures, collocated: Figures) -> list[Row]:
    return [_row(line, getattr(exclusive, line.field), getattr(collocated, line.field)) for line in LINES]


def _row(line: Line, before: float | None, after: float | None) -> Row:
    change = change_percent(before, after)
    published = PUBLISHED_PERCENT.get(line.field)
    return Row(
        label=line.label,
        exclusive="-" if before is None else line.show(before),
        collocated="-" if after is None else line.show(after),
        change="" if change is None else f"{change:+.0f} %",
        published="" if published is None else f"{published:+.0f} %",
    )


def changes(exclusive: Figures, collocated: Figures) -> dict[str, float | None]:
    """For --json: the change of each figure, in percent."""
    return {
        line.field: change_percent(getattr(exclusive, line.field), getattr(collocated, line.field)) for line in LINES
    }


def with_old_names(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {**values, **{old: values[new] for new, old in OLD_NAMES.items() if new in values}}


def plain_table(header: Row, body: list[Row]) -> str:
    """With a line under its head."""
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    return "\n".join(aligned([header, Row(*("-" * width for width in widths)), *body]))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns with two spaces between them; the label to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return lines
