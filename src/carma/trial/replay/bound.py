"""From an estimate to a bound that can be booked: it holds with a stated probability.

The score of a measured case is log(measured / estimated footprint), divided by its scale, which grows with the spread
of the replays. One-sided split conformal prediction: of n scores of similar cases, the ceil((n + 1) · level)-th
smallest, times this case's scale, is the margin; a new case of the same kind stays below the bound with at least that
probability. Similar cases form a group: whether there are convolutions, and their arithmetic. A group with too few
scores for the level uses those of the larger group that contains it.

The scores are shipped (data/trace-scores.json; `python -m lab.tools.fit_bounds` writes them). They come from families
that the model of workspaces did not know.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.trial.report import Call, TrialReport

SCORES = Path(__file__).parent.parent / "data" / "trace-scores.json"
SCALE = 0.05  # of a case whose replays agree
STRETCH = 1.25  # errors in one family are correlated, so a new family differs more than a new case of a known one
LEAST = 0.02  # least margin: three steps do not show everything of a long run
NO_SCORES = 0.25  # margin of a group without measurements
PARENTS = {
    "conv-half": "conv",
    "conv-tf32": "conv",
    "conv-strict": "conv",
    "conv-mixed": "conv",
    "guessed": "conv",
    "recurrent": "plain",
}
# Memory of cudnn.benchmark depends on free memory, and it tries less under a limit: higher levels are not promised.
MOST_LEVEL = {"benchmark": 0.9}


class Score(Record, frozen=True, array_like=True):
    """Score of one measured case: log(measured / estimated), and the spread of its replays."""

    family: str
    group: str
    score: float
    spread: float = 0.0


class Scores(Record, frozen=True, kw_only=True):
    format: int = 2
    source: str = ""
    cases: tuple[Score, ...]

    def of(self, group: str) -> list[float]:
        """Scores in units of the scale, ascending; including those of the groups within it."""
        found = [case for case in self.cases if group in (case.group, PARENTS.get(case.group))]
        return sorted(case.score / (SCALE + case.spread) for case in found)


class FootprintBound(Record, frozen=True, kw_only=True):
    upper_bytes: float
    level: float
    warnings: tuple[str, ...] = ()


def group_of(report: TrialReport) -> str:
    """The group of a case, by its most important property."""
    convolutions = [call for call in report.calls if call.op.startswith("conv")]
    if any("benchmark" in call.flags for call in convolutions):
        return "benchmark"
    if "guessed_sizes" in report.flags:
        return "guessed"
    if not convolutions:
        return "recurrent" if any(call.op.startswith("rnn") for call in report.calls) else "plain"
    kinds = {_arithmetic(call) for call in convolutions}
    return f"conv-{'strict' if 'strict' in kinds else 'mixed' if len(kinds) > 1 else kinds.pop()}"


def _arithmetic(call: Call) -> str:
    if call.dtype in ("float16", "bfloat16"):
        return "half"
    return "tf32" if "tf32" in call.flags else "strict"


def bound_for(
    footprint_bytes: float, spread: float, group: str, level: float, scores: Scores | None = None
) -> FootprintBound:
    most_level = min(level, MOST_LEVEL.get(group, 1.0))
    margin, reached, warnings = _margin(scores or _shipped(), group, spread, most_level)
    return FootprintBound(upper_bytes=footprint_bytes * math.exp(max(LEAST, margin)), level=reached, warnings=warnings)


def _margin(scores: Scores, group: str, spread: float, level: float) -> tuple[float, float, tuple[str, ...]]:
    """The margin, its level, and warnings about it."""
    largest = None
    for name in (group, PARENTS.get(group)):
        found = scores.of(name) if name is not None else []
        rank = math.ceil((len(found) + 1) * level)
        if 0 < rank <= len(found):
            return STRETCH * found[rank - 1] * (SCALE + spread), level, ()
        if found:
            largest = STRETCH * found[-1] * (SCALE + spread), round(len(found) / (len(found) + 1), 3)
    if largest is None:
        return NO_SCORES, level, (f"no case of this kind ({group}) was measured: a quarter is added",)
    few = f"there are too few measured cases of this kind ({group}) for a bound at {100 * level:g} %"
    return *largest, (f"{few}: its level is {100 * largest[1]:g} %",)


@lru_cache(maxsize=1)
def _shipped() -> Scores:
    return msgspec.json.decode(SCORES.read_bytes(), type=Scores)
