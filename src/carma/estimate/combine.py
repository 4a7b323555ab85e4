"""Asks the estimators in order and takes the first answer; the refusals before it are kept for `carma explain`.

This is where plugins end and CARMA begins: whatever an estimator does (raise, answer nonsense) becomes a refusal that
names it. What passes can be stored and booked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from carma.core.model import Estimate, NoEstimate
from carma.core.ports import EstimateRequest, Estimator

_answers = msgspec.json.Decoder(Estimate)
_MOST_MIB = 1 << 40  # no memory is that large; SQLite and JSON hold it


def first_answer(
    estimators: Sequence[Estimator], request: EstimateRequest
) -> tuple[Estimate | None, tuple[NoEstimate, ...]]:
    refusals: list[NoEstimate] = []
    for estimator in estimators:
        answer = _ask(estimator, request)
        if isinstance(answer, Estimate):
            return answer, tuple(refusals)
        refusals.append(answer)
    return None, tuple(refusals)


def _ask(estimator: Estimator, request: EstimateRequest) -> Estimate | NoEstimate:
    name = str(getattr(estimator, "name", type(estimator).__name__))
    started_s = time.monotonic()
    try:
        answer: object = estimator.estimate(request)
        seconds = time.monotonic() - started_s
        if isinstance(answer, NoEstimate):
            return NoEstimate(source=name, reason=str(answer.reason))
        return _checked(answer, seconds)
    except Exception as error:
        return NoEstimate(source=name, reason=f"it raised {type(error).__name__}: {error}")


def _checked(answer: object, seconds: float) -> Estimate:
    """The answer as it will be read from the store; raises ValueError for what cannot be booked."""
    if not isinstance(answer, Estimate):
        raise TypeError(f"its answer is a {type(answer).__name__}, not an Estimate")
    # Through JSON and back: types are checked, and an optional figure that is not a number becomes absent.
    estimate = _answers.decode(msgspec.json.encode(msgspec.structs.replace(answer, seconds=seconds)))
    if not 0 < estimate.footprint_mib <= estimate.upper_mib <= _MOST_MIB:
        raise ValueError(f"{estimate.footprint_mib} MiB, at most {estimate.upper_mib} MiB, cannot be booked")
    return estimate
