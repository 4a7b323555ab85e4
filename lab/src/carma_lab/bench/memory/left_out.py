"""Judges a bound on families that it does not know.

A bound rests on the errors of measured runs, so it may not be judged on those same runs. Each family is judged by the
errors of all others. It needs the rows of a comparison only: nothing is run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from carma.trial.replay.bound import Score, Scores, bound_for
from carma_lab.bench.memory.figures import Row


def scores_of(rows: Iterable[Row], source: str = "") -> Scores:
    """What bounds rest on: of each run that was replayed, its family, its group, its error and its replays' spread."""
    scores = [
        Score(row.family, row.group, round(math.log(row.measured_mib / row.replayed_mib), 5), round(row.spread, 5))
        for row in rows
        if row.replayed_mib is not None
    ]
    return Scores(source=source, cases=tuple(sorted(scores, key=lambda one: (one.group, one.family, one.score))))


def left_out_bounds(rows: Sequence[Row], level: float) -> tuple[Row, ...]:
    """The rows with point and bound as they are for somebody whose family was never measured."""
    known = scores_of(rows)
    return tuple(_judged(row, known.without(row.family), level) for row in rows)


def _judged(row: Row, scores: Scores, level: float) -> Row:
    if row.replayed_mib is None:
        return row
    bound = bound_for(row.replayed_mib, row.spread, row.group, level, scores)
    return replace(row, estimated_mib=row.replayed_mib, bound_mib=bound.upper_bytes)
