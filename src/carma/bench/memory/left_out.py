"""Judges a bound on families that it does not know.

A bound rests on the errors of measured runs, so it may not be judged on those same runs. Each family is judged by the
errors of all others; the correction of the point is learned again without it too. It needs the rows of a comparison
only: nothing is run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from msgspec.structs import replace

from carma.bench.memory.figures import Row
from carma.estimate.trace.bound import SAFETY, Score, Scores

MOVED_FROM = 0.01  # a group whose middle is off by less is left where it is
NO_SCORES = 0.25  # the margin of a group without a single score, before SAFETY


def scores_of(rows: Iterable[Row], source: str = "") -> Scores:
    """What bounds rest on: of each run that was replayed, its family, its group and log(measured / replayed)."""
    scores = [
        Score(row.family, row.group, round(math.log(row.measured_mib / row.replayed_mib), 5))
        for row in rows
        if row.replayed_mib is not None
    ]
    shifts: dict[str, float] = {}
    for group in sorted({score.group for score in scores}):
        middle = median(score.score for score in scores if score.group == group)
        if abs(middle) >= MOVED_FROM:
            shifts[group] = round(middle, 5)
    ordered = sorted(scores, key=lambda score: (score.group, score.family, score.score))
    return Scores(source=source, cases=tuple(ordered), shifts=shifts)


def left_out_bounds(rows: Sequence[Row], level: float) -> tuple[Row, ...]:
    """The rows with point and bound as they are for somebody whose family was never measured."""
    known = {family: scores_of(row for row in rows if row.family != family) for family in {row.family for row in rows}}
    return tuple(_judged(row, known[row.family], level) for row in rows)


def _judged(row: Row, scores: Scores, level: float) -> Row:
    if row.replayed_mib is None:
        return row
    point = row.replayed_mib * math.exp(scores.shifts.get(row.group, 0.0))
    upper = point * math.exp(max(0.0, margin(scores.of(row.group), level)))
    return replace(row, estimated_mib=point, bound_mib=upper)


def margin(scores: Sequence[float], level: float) -> float:
    """As trace/bound.py takes it from scores in ascending order: one-sided split conformal prediction."""
    rank = math.ceil((len(scores) + 1) * level)
    if 0 < rank <= len(scores):
        return scores[rank - 1]
    return max(scores, default=NO_SCORES) * SAFETY
