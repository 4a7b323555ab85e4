"""Figures of a replay (waits, slowdown, makespan, energy), and the table that compares two replays. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from carma.core.model.units import show_j, show_s
from carma.core.model.values import Record
from carma.wire.api_types import Outcome, TaskView


class ReplayedTask(Record, frozen=True, kw_only=True):
    """One finished task of a replay, from the daemon's history; times in virtual seconds of the daemon's clock."""

    view: TaskView
    alone_s: float

    @property
    def ended_at(self) -> float:
        return self.view.submitted_at if self.view.ended_at is None else self.view.ended_at

    @property
    def succeeded(self) -> bool:
        return _kind(self.view.outcome) == "succeeded"

    @property
    def running_s(self) -> list[float]:
        """The durations of the attempts that had a process."""
        return [
            attempt.ended_at - attempt.started_at
            for attempt in self.view.attempts
            if attempt.started_at is not None and attempt.ended_at is not None
        ]

    @property
    def wait_s(self) -> float:
        """Total time without a running attempt: in the queue, and between attempts."""
        return max(0.0, self.ended_at - self.view.submitted_at - sum(self.running_s))

    @property
    def slowdown(self) -> float | None:
        """Duration of the successful attempt divided by the duration alone; None without success."""
        return self.running_s[-1] / self.alone_s if self.succeeded and self.running_s else None


def _kind(outcome: Outcome | None) -> object:
    return (outcome or {}).get("kind")


class ReplayFigures(Record, frozen=True, kw_only=True):
    """One column of the table. None: not known (a GPU without the metric), never 0."""

    tasks: int
    succeeded: int
    makespan_s: float
    wait_mean_s: float
    wait_p95_s: float
    completion_mean_s: float
    slowdown_mean: float | None
    slowdown_p95: float | None
    ooms: int
    sm_active_mean: float | None = None
    energy_j: float | None = None


def summarise(
    runs: Sequence[ReplayedTask], *, sm_active_mean: float | None = None, energy_j: float | None = None
) -> ReplayFigures:
    """All figures of one replay; `sm_active_mean` is the mean over all GPUs and the whole makespan."""
    if not runs:
        raise ValueError("no task ran, so there is nothing to summarise")
    waits = [run.wait_s for run in runs]
    slowdowns = [run.slowdown for run in runs if run.slowdown is not None]
    return ReplayFigures(
        tasks=len(runs),
        succeeded=sum(run.succeeded for run in runs),
        makespan_s=max(run.ended_at for run in runs) - min(run.view.submitted_at for run in runs),
        wait_mean_s=fmean(waits),
        wait_p95_s=percentile(waits, 95),
        completion_mean_s=fmean([run.ended_at - run.view.submitted_at for run in runs]),
        slowdown_mean=fmean(slowdowns) if slowdowns else None,
        slowdown_p95=percentile(slowdowns, 95) if slowdowns else None,
        ooms=sum(_kind(attempt.outcome) == "out_of_memory" for run in runs for attempt in run.view.attempts),
        sm_active_mean=sm_active_mean,
        energy_j=energy_j,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values (numpy's default rule)."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_average(points: Sequence[tuple[float, float]], until: float) -> float | None:
    """The mean over time of a value that holds from each (time, value) to the next one, the last one until `until`."""
    if not points or until <= points[0][0]:
        return None
    total = 0.0
    for (at, value), (following, _) in zip(points, [*points[1:], (until, 0.0)], strict=True):
        total += value * max(0.0, min(following, until) - at)
    return total / (until - points[0][0])


def change_percent(before: float | None, after: float | None) -> float | None:
    """Change in percent, such as -35.0; None if either value is unknown or the first is 0."""
    if before is None or after is None or before == 0:
        return None
    return 100.0 * (after - before) / before


# The table: the figures of both runs, their change, and the published change.

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
    """An energy with one more digit than usual, because the table compares two runs."""
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
