"""Sums of the trial, computed from rows and samples. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, cast

from carma_lab.bench.gpu.trial_shapes import Solo


def steps_at(progress: Sequence[tuple[float, int]], at: float) -> float:
    """How many steps a task had made by then, by its own log; between two lines in proportion."""
    before = (progress[0][0], 0)
    for moment, steps in progress:
        if moment >= at:
            span_s = moment - before[0]
            share = (at - before[0]) / span_s if span_s > 0 else 1.0
            return max(0.0, before[1] + share * (steps - before[1])) if at > before[0] else float(before[1])
        before = (moment, steps)
    return float(before[1])


def expected_sm(rows: Sequence[dict[str, Any]], solo: dict[str, Solo], since: float, until: float) -> float | None:
    """The SM activity that the steps made in that span ask for: each task's solo figure times its speed, added up.

    Kernels that share an SM at the same moment count once for the GPU and twice here, so it is an upper bound; None
    when a task that trained then is not known alone.
    """
    total = 0.0
    for row in rows:
        progress = row["own"].get("progress")
        if not progress:
            continue
        rate = (steps_at(progress, until) - steps_at(progress, since)) / (until - since)
        if rate <= 0.0:
            continue
        known = solo.get(row["name"])
        if known is None:
            return None
        total += known.sm_active * rate / known.rate
    return total


def held_against(
    rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], solo: dict[str, Solo], window_s: float
) -> dict[str, Any] | None:
    """The GPU's measured SM activity against what the tasks' own steps ask for, over the same windows."""
    pairs: list[tuple[float, float]] = []
    for sample in samples:
        at, measured = sample["at"], sample["sm_active"]
        expected = expected_sm(rows, solo, at - window_s, at)
        if measured is not None and expected:
            pairs.append((measured, expected))
    if not pairs:
        return None
    return {
        "samples": len(pairs),
        "measured_mean": statistics.fmean(measured for measured, _ in pairs),
        "expected_mean": statistics.fmean(expected for _, expected in pairs),
        "mean_absolute_difference": statistics.fmean(abs(measured - expected) for measured, expected in pairs),
        "correlation": _correlation(pairs),
    }


def side_by_side(shared: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Over the tasks that succeeded in both runs. Makespans are compared only when that is all of them."""
    both = _succeeded(shared) & _succeeded(alone)
    complete = len(both) == shared["tasks_submitted"]
    return {
        "tasks": len(both),
        "complete": complete,
        "makespan_s": _pair(shared["makespan_s"], alone["makespan_s"]) if complete else None,
        "energy_j": _pair(shared["energy_j"], alone["energy_j"]) if complete else None,
        "ran_s": _pair(_sum(shared, both, "ran_s"), _sum(alone, both, "ran_s")),
        "energy_of_tasks_j": _pair(_sum(shared, both, "energy_j"), _sum(alone, both, "energy_j")),
        "slowdown_median": _slowdown(shared, alone, both),
    }


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    try:
        return statistics.correlation([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    except statistics.StatisticsError:  # fewer than two, or one of them never changes
        return None


def _succeeded(run: dict[str, Any]) -> set[str]:
    return {row["name"] for row in run["tasks"] if row["outcome"] == "succeeded"}


def _pair(shared: float | None, alone: float | None) -> dict[str, float | None]:
    change = 100 * (shared / alone - 1) if shared is not None and alone else None
    return {"collocated": shared, "exclusive": alone, "change_percent": change}


def _sum(run: dict[str, Any], names: set[str], what: str) -> float | None:
    found = [row[what] for row in run["tasks"] if row["name"] in names]
    return None if any(value is None for value in found) else sum(found)


def _slowdown(shared: dict[str, Any], alone: dict[str, Any], names: set[str]) -> float | None:
    """Training time, start-up left out, against training time alone: the middle task."""
    spans = [{row["name"]: row["own"].get("trained_s") for row in run["tasks"]} for run in (shared, alone)]
    ratios = [spans[0][name] / spans[1][name] for name in names if spans[0].get(name) and spans[1].get(name)]
    return cast(float, statistics.median(ratios)) if ratios else None
