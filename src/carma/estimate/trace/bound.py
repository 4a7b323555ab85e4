"""From the replay's figure to one that can be booked: a bound that holds with a stated probability.

The score of a measured case is log(measured / predicted footprint). One-sided split conformal prediction: of n scores
of cases like this one, the ceil((n + 1) · level)-th smallest is the margin; then a new case of the kind stays under
the bound with at least that probability. "Like this one" is a group: where convolutions work, with which arithmetic.
A group with too few scores for the level takes its largest one with a further margin, and says so.

The scores are shipped (data/trace-scores.json; tools/fit_bounds.py makes them from results/); they come from model
families that the workspaces' model was not fitted on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import msgspec

from carma.core.model import Record
from carma.estimate.trace.report import Call

SCORES = Path(__file__).parent.parent / "data" / "trace-scores.json"
SAFETY = 1.25  # on the largest score of a group that is too small for the level


class Features(Record, frozen=True, kw_only=True):
    footprint_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    scratch_bytes: int
    cudnn: bool
    convolutions: tuple[Call, ...] = ()
    recurrent: bool = False
    flags: tuple[str, ...] = ()
    grows: bool = False


class Bound(Record, frozen=True, kw_only=True):
    point_bytes: float
    upper_bytes: float
    level: float
    group: str
    warnings: tuple[str, ...] = ()


class Score(Record, frozen=True, array_like=True):
    """Of one measured case: log(measured / predicted)."""

    family: str
    group: str
    score: float


class Scores(Record, frozen=True, kw_only=True):
    format: int = 1
    source: str = ""
    cases: tuple[Score, ...]
    shifts: dict[str, float] = {}  # by group: what the point is moved by, as a logarithm

    def of(self, group: str) -> list[float]:
        """Ascending, as far off as the moved point was; of all cases where there is none of the group."""
        found = [case.score for case in self.cases if case.group == group]
        return sorted(score - self.shifts.get(group, 0.0) for score in found)

    def without(self, family: str) -> Scores:
        """For judging: a case is never measured against its own family."""
        kept = tuple(case for case in self.cases if case.family != family)
        return Scores(format=self.format, source=self.source, cases=kept, shifts=self.shifts)


def group_of(features: Features) -> str:
    """The kind of case, most telling mark first."""
    if any("benchmark" in call.flags for call in features.convolutions):
        return "benchmark"
    if not features.convolutions:
        return "recurrent" if features.recurrent else "plain"
    kinds = {_arithmetic(call) for call in features.convolutions}
    return f"conv-{'strict' if 'strict' in kinds else 'mixed' if len(kinds) > 1 else kinds.pop()}"


def _arithmetic(call: Call) -> str:
    if call.dtype in ("float16", "bfloat16"):
        return "half"
    return "tf32" if "tf32" in call.flags else "strict"


def bound_for(features: Features, level: float, scores: Scores | None = None) -> Bound:
    known = scores if scores is not None else _shipped()
    group = group_of(features)
    point = features.footprint_bytes * math.exp(known.shifts.get(group, 0.0))
    margin, warnings = _margin(known.of(group), level, group)
    return Bound(
        point_bytes=point,
        upper_bytes=point * math.exp(max(0.0, margin)),
        level=level,
        group=group,
        warnings=warnings,
    )


def _margin(scores: list[float], level: float, group: str) -> tuple[float, tuple[str, ...]]:
    rank = math.ceil((len(scores) + 1) * level)
    if 0 < rank <= len(scores):
        return scores[rank - 1], ()
    largest = max(scores, default=0.25)
    told = f"the bound rests on {len(scores)} measured cases of its kind ({group}), too few for {100 * level:g} %"
    return largest * SAFETY, (f"{told}: the largest miss and a quarter more were taken",)


@lru_cache(maxsize=1)
def _shipped() -> Scores:
    return msgspec.json.decode(SCORES.read_bytes(), type=Scores)
