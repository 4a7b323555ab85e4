"""Creates the estimators of the settings and asks them in order; the first answer counts.

1. `make_estimators` creates the estimators that `[memory] sources` names.
2. `first_answer` asks them in order. Refusals before the answer are returned for `carma explain`. An exception or an
   invalid answer of a plugin becomes a refusal that names the plugin. A refusal may contain an amount of memory that
   was not enough; the answer is then raised above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from carma.core.model.units import show_mib
from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest, Estimator
from carma.core.telemetry.booking_shrink import with_margin
from carma.errors import CarmaError, PluginError
from carma.plugins import ESTIMATORS, load_one
from carma.trial.protocol import Context

_answers = msgspec.json.Decoder(Estimate)
_MOST_MIB = 1 << 40  # larger than any memory; SQLite and JSON can hold it

Answer = tuple[Estimate | None, tuple[NoEstimate, ...]]


class Source(NamedTuple):
    """The estimator of a plugin, with defaults for the attributes that a plugin may leave out."""

    name: str
    quick: bool
    estimate: Callable[[EstimateRequest], Estimate | NoEstimate]


def make_estimators(context: Context) -> tuple[Estimator, ...]:
    """The estimators of `[memory] sources`, in that order. Raises PluginError for an unknown name or a factory that
    fails: a source that is silently missing would change every decision."""
    return tuple(make_estimator(name, context) for name in context.rules.memory.sources)


def make_estimator(name: str, context: Context) -> Estimator:
    """One estimator by its name, whether or not the settings name it."""
    factory = load_one(ESTIMATORS, name)
    if not callable(factory):
        raise PluginError(f"the estimator {name!r} is a {type(factory).__name__}, not a function of a Context")
    try:
        made = factory(context)
    except CarmaError:
        raise
    except Exception as error:
        raise PluginError(
            f"the estimator {name!r} cannot be made: {type(error).__name__}: {error}",
            "Take it out of sources in [memory], or correct what it complains about.",
        ) from error
    if not callable(getattr(made, "estimate", None)):
        raise PluginError(f"the estimator {name!r} made a {type(made).__name__}, which has no method `estimate`")
    return Source(str(getattr(made, "name", name)), getattr(made, "quick", False) is True, made.estimate)


def first_answer(
    estimators: Sequence[Estimator], request: EstimateRequest, refused: Sequence[NoEstimate] = ()
) -> Answer:
    """`refused`: refusals of estimators that were asked before."""
    refusals = list(refused)
    for place, estimator in enumerate(estimators):
        answer = _ask(estimator, request)
        if isinstance(answer, Estimate):
            whole = with_past_runs(answer, estimators[place + 1 :], request)
            return _lifted(whole, refusals), tuple(refusals)
        refusals.append(answer)
    return None, tuple(refusals)


def with_past_runs(estimate: Estimate, others: Sequence[Estimator], request: EstimateRequest) -> Estimate:
    """The estimate, with demand, run time and rate of steps from the first quick source among `others` that knows them.

    A demand that the estimate only predicts is replaced; a demand or run time that it has from past runs stays. So a
    declared amount of memory does not hide what history knows of the task.
    """
    seen = estimate.demand is not None and not estimate.demand_predicted
    if seen and estimate.runtime_s is not None:
        return estimate
    for other in others:
        known = _ask(other, request) if other.quick else None
        if isinstance(known, Estimate) and _knows_past_runs(known):
            better = known.demand is not None and not seen
            return msgspec.structs.replace(
                estimate,
                demand=known.demand if better else estimate.demand,
                demand_predicted=known.demand_predicted if better else estimate.demand_predicted,
                runtime_s=known.runtime_s if estimate.runtime_s is None else estimate.runtime_s,
                alone_steps_per_s=known.alone_steps_per_s
                if estimate.alone_steps_per_s is None
                else estimate.alone_steps_per_s,
            )
    return estimate


def _knows_past_runs(known: Estimate) -> bool:
    return any(figure is not None for figure in (known.demand, known.runtime_s, known.alone_steps_per_s))


def split(estimators: Sequence[Estimator]) -> tuple[tuple[Estimator, ...], tuple[Estimator, ...]]:
    """The estimators that answer at once (`quick = True`), up to the first slow one; and the rest."""
    at = next((place for place, one in enumerate(estimators) if not one.quick), len(estimators))
    return tuple(estimators[:at]), tuple(estimators[at:])


def above(estimate: Estimate, more_than_mib: int, why: str) -> Estimate:
    """The estimate, raised above an amount that was not enough if necessary. Its parts then no longer add up and are
    dropped."""
    if estimate.footprint_mib > more_than_mib and estimate.upper_mib >= with_margin(more_than_mib):
        return estimate
    footprint_mib = max(estimate.footprint_mib, more_than_mib + 1)
    return msgspec.structs.replace(
        estimate,
        footprint_mib=footprint_mib,
        upper_mib=max(estimate.upper_mib, with_margin(footprint_mib)),
        parts_mib=estimate.parts_mib if footprint_mib == estimate.footprint_mib else {},
        warnings=(*estimate.warnings, f"raised from {show_mib(estimate.footprint_mib)}: {why}"),
    )


def _lifted(estimate: Estimate, refusals: Sequence[NoEstimate]) -> Estimate:
    """Raises the estimate above known minimums. A declared amount stays, because recovery corrects it."""
    known = [refusal for refusal in refusals if refusal.more_than_mib is not None]
    if not known or estimate.source == "declared":
        return estimate
    most = max(known, key=lambda refusal: refusal.more_than_mib or 0)
    return above(estimate, most.more_than_mib or 0, f"{most.source} knows that it needs more ({most.reason})")


def _ask(estimator: Estimator, request: EstimateRequest) -> Estimate | NoEstimate:
    started_s = time.monotonic()
    try:
        answer: object = estimator.estimate(request)
        seconds = time.monotonic() - started_s
        if isinstance(answer, NoEstimate):
            more_than_mib = _floor(answer.more_than_mib)
            return NoEstimate(source=estimator.name, reason=str(answer.reason), more_than_mib=more_than_mib)
        return _checked(answer, seconds)
    except Exception as error:
        return NoEstimate(source=estimator.name, reason=f"it raised {type(error).__name__}: {error}")


def _floor(more_than_mib: object) -> int | None:
    return more_than_mib if isinstance(more_than_mib, int) and 0 < more_than_mib <= _MOST_MIB else None


def _checked(answer: object, seconds: float) -> Estimate:
    """Returns the answer as the store would read it; raises ValueError for amounts that cannot be booked."""
    if not isinstance(answer, Estimate):
        raise TypeError(f"its answer is a {type(answer).__name__}, not an Estimate")
    # Through JSON and back: types are checked, and an optional figure that is not a number becomes absent.
    estimate = _answers.decode(msgspec.json.encode(msgspec.structs.replace(answer, seconds=seconds)))
    if not 0 < estimate.footprint_mib <= estimate.upper_mib <= _MOST_MIB:
        raise ValueError(f"{estimate.footprint_mib} MiB, at most {estimate.upper_mib} MiB, cannot be booked")
    return estimate
