"""Makes the scores that bounds rest on (src/carma/estimate/data/trace-scores.json) from a comparison with measurements:

    python -m tools.fit_bounds results/h200/memory/estimators.json

Each case gives its family, its group and log(measured / predicted footprint).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median

import msgspec

from carma.core.model import Record
from carma.estimate.trace.bound import SCORES, Score, Scores

MOVED_FROM = 0.01  # a group's middle that is off by less stays where it is


class Case(Record, frozen=True, kw_only=True):
    case: str
    family: str
    group: str
    measured_mib: float
    replayed_mib: float  # before any correction


class Comparison(Record, frozen=True, kw_only=True):
    source: str
    cases: tuple[Case, ...]


def fitted(comparison: Comparison) -> Scores:
    scores = [
        Score(case.family, case.group, round(math.log(case.measured_mib / case.replayed_mib), 5))
        for case in comparison.cases
    ]
    shifts: dict[str, float] = {}
    for group in sorted({score.group for score in scores}):
        middle = median(score.score for score in scores if score.group == group)
        if abs(middle) >= MOVED_FROM:
            shifts[group] = round(middle, 5)
    return Scores(source=comparison.source, cases=tuple(sorted(scores, key=lambda score: (score.group, score.family, score.score))), shifts=shifts)


def main(arguments: list[str]) -> int:
    comparison = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Comparison)
    scores = fitted(comparison)
    SCORES.write_bytes(msgspec.json.format(msgspec.json.encode(scores), indent=0) + b"\n")
    for group in sorted({score.group for score in scores.cases}):
        found = scores.of(group)
        moved = scores.shifts.get(group, 0.0)
        print(f"{group:12} {len(found):4} cases, middle moved by {moved:+.3f}, most {found[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
