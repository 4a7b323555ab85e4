"""Figures of an interference table, from its rows: progress relative to running alone, and the effect of MPS
percentages.

Rates drift while a study runs (up to 13 % for tasks that wait for their CPU side), so every task is measured alone at
the beginning, in the middle and at the end, and a group is compared with the rate alone at its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from carma_lab.bench.gpu.meter import Shown


class Row(Shown, frozen=True, kw_only=True):
    """One group: who, each one's steps per second, and what the GPU showed meanwhile."""

    tasks: tuple[str, ...]
    percent: tuple[int, ...]  # MPS active thread percentage of each; 100: none set
    rates: tuple[float, ...]
    solo_rates: tuple[float | None, ...] = ()  # each alone and without a percentage, at this row's moment
    cpu: tuple[float | None, ...] = ()  # of a core, of each one's process
    at_s: float = 0.0  # since the study began
    memory_used_mib: int | None = None


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of one size. Progress: the sum over the group of rate against rate alone; 1 is no gain."""

    size: int
    groups: int
    progress_least: float
    progress_median: float
    progress_most: float
    worst_slowdown_median: float  # of the task that fares worst in its group
    worst_slowdown_most: float


class Guarding(msgspec.Struct, frozen=True, kw_only=True):
    """Heavy tasks held to a thread percentage beside light ones; each speed is a median, against running alone."""

    percent: int
    pairs: int
    light_before: float  # beside the heavy one without a percentage
    light_after: float
    heavy_before: float
    heavy_after: float
    heavy_alone: float | None  # with the percentage and no neighbour
    total_before: float
    total_after: float


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Between the two nearest in time, in proportion; outside them the nearest one."""
    before = [point for point in points if point[0] <= at]
    after = [point for point in points if point[0] > at]
    if not before or not after:
        nearest = max(before, default=None) or min(after, default=None)
        return None if nearest is None else nearest[1]
    (early, first), (late, last) = max(before), min(after)
    return first + (last - first) * (at - early) / (late - early)


def with_solo_rates(rows: Sequence[Row]) -> list[Row]:
    """The same rows, each with what its tasks did alone at that moment, as far as that is known by now."""
    alone: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if len(row.tasks) == 1 and row.percent == (100,):
            alone.setdefault(row.tasks[0], []).append((row.at_s, row.rates[0]))
    return [
        msgspec.structs.replace(
            row, solo_rates=tuple(interpolated(alone.get(name, ()), row.at_s) for name in row.tasks)
        )
        for row in rows
    ]


def speeds(row: Row) -> tuple[float, ...] | None:
    """Each task's rate against its rate alone; None where one is not known or stood still."""
    if not row.solo_rates or not all(row.solo_rates):
        return None
    return tuple(rate / (solo or 1.0) for rate, solo in zip(row.rates, row.solo_rates, strict=True))


def by_size(rows: Sequence[Row]) -> list[Sharing]:
    found: dict[int, list[tuple[float, ...]]] = {}
    for row in rows:
        own = speeds(row)
        if len(row.tasks) > 1 and set(row.percent) == {100} and own is not None:
            found.setdefault(len(row.tasks), []).append(own)
    return [_sharing(size, groups) for size, groups in sorted(found.items())]


def _sharing(size: int, groups: Sequence[tuple[float, ...]]) -> Sharing:
    totals = [sum(own) for own in groups]
    worst = [1 / min(own) if min(own) > 0 else float("inf") for own in groups]
    return Sharing(
        size=size,
        groups=len(groups),
        progress_least=min(totals),
        progress_median=median(totals),
        progress_most=max(totals),
        worst_slowdown_median=median(worst),
        worst_slowdown_most=max(worst),
    )


def by_percent(rows: Sequence[Row]) -> list[Guarding]:
    """Pairs (light, heavy) that were measured with a percentage on the heavy one and without."""
    pairs: dict[int, dict[tuple[str, ...], tuple[float, ...]]] = {}
    alone: dict[int, list[float]] = {}
    for row in rows:
        own = speeds(row)
        if own is None or len(row.tasks) > 2:
            continue
        if len(row.tasks) == 2:
            pairs.setdefault(row.percent[1], {})[row.tasks] = own
        elif row.percent != (100,):
            alone.setdefault(row.percent[0], []).append(own[0])
    free = pairs.pop(100, {})
    return [
        _guarding(percent, [(free[tasks], own) for tasks, own in held.items() if tasks in free], alone.get(percent, []))
        for percent, held in sorted(pairs.items())
        if any(tasks in free for tasks in held)
    ]


def _guarding(
    percent: int, both: Sequence[tuple[tuple[float, ...], tuple[float, ...]]], alone: Sequence[float]
) -> Guarding:
    return Guarding(
        percent=percent,
        pairs=len(both),
        light_before=median(before[0] for before, _ in both),
        light_after=median(after[0] for _, after in both),
        heavy_before=median(before[1] for before, _ in both),
        heavy_after=median(after[1] for _, after in both),
        heavy_alone=median(alone) if alone else None,
        total_before=median(sum(before) for before, _ in both),
        total_after=median(sum(after) for _, after in both),
    )
