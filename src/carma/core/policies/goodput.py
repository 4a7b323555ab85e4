"""Goodput: the GPU on which the task adds most progress in total, as long as no task is slowed down beyond a cap.

The sharing model (sharing_model.py) predicts progress from the demand of each task alone. A task of unknown demand
counts as a typical task of its memory size; a second, higher limit holds for the case that it is a demanding one. The
cap is on the whole run of a task: a task that had its GPU alone for an hour may have a neighbour for a while. A new
task waits if, on every GPU, it or a neighbour would exceed the cap. A task that would run longer than all others
together need is started first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from carma.core.model.decision import Ask, Part, Reason
from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, Record, TaskId
from carma.core.scheduling.forecast import (
    ALONE,
    Baseline,
    Forecast,
    Terms,
    asked_of,
    baseline,
    forecast,
)
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy, Ranked, Waits
from carma.core.scheduling.sharing_model import mechanism_of

MIN_GAIN = 0.2  # minimum gain, as a fraction of a GPU's work: less is not worth the slowdown
SHARED_THROUGHPUT = 1.3  # of a shared GPU, relative to one task alone; for the time until all tasks are done
MAX_REMEMBERED = 4096  # predictions
LATE_FACTOR = 1.2  # a task is late if its run time alone times this exceeds the time until all others are done


Predict = Callable[[Ask, Sequence[Holder]], Forecast]
"""What is predicted if the task joins those holders."""


def remembering(terms: Terms) -> Predict:
    """Answers are remembered by all that they depend on: the same questions are asked in every pass."""

    @lru_cache(MAX_REMEMBERED)
    def undisturbed(holders: tuple[Holder, ...], at: float) -> Baseline:
        return baseline([holders], at, terms)

    @lru_cache(MAX_REMEMBERED)
    def answer(question: Ask, holders: tuple[Holder, ...]) -> Forecast:
        return forecast(question, undisturbed(holders, question.at), terms)

    def predict(ask: Ask, holders: Sequence[Holder]) -> Forecast:
        if not holders:
            return ALONE
        demand, correction = asked_of(ask, terms), ask.correction
        question = Ask(TaskId(0), 1, 0, "", demand=demand, alone_s=ask.alone_s, at=ask.at, correction=correction)
        return answer(question, tuple(holders))

    return predict


class Limits(Record, frozen=True):
    """The cap on the expected slowdown, and the limit for the case that tasks of unknown demand are demanding."""

    expected: Terms
    bad_case: Terms


def limits_of(rules: Rules) -> Limits:
    cap, mechanism = rules.placement.slowdown_cap, mechanism_of(rules)
    return Limits(Terms(cap, mechanism), Terms(max(cap, rules.placement.slowdown_limit), mechanism, worst_case=True))


def joint_objection(limits: Limits, ask: Ask, gpus: Sequence[Sequence[Holder]]) -> Reason | None:
    """Objection to a set of GPUs for one task. Its rate is that of the slowest GPU, which changes as neighbours end."""
    holders = list({holder.key: holder for holders_of_one in gpus for holder in holders_of_one}.values())
    for terms in (limits.expected, limits.bad_case) if _any_unknown(ask, holders) else (limits.expected,):
        found = forecast(ask, baseline(gpus, ask.at, terms), terms)
        if found.worst > terms.cap:
            return Reason("Slowdown", _too_slow, (found, ask, holders, terms))
    return None


def _any_unknown(ask: Ask, holders: Sequence[Holder]) -> bool:
    return ask.demand is None or None in [holder.demand for holder in holders]


def objection(
    limits: Limits, expected: Predict, bad_case: Predict, ask: Ask, holders: Sequence[Holder]
) -> Reason | None:
    found = expected(ask, holders)
    if found.worst > limits.expected.cap:
        return Reason("Slowdown", _too_slow, (found, ask, holders, limits.expected))
    if found.gain < MIN_GAIN:
        return Reason("Slowdown", _too_little, (holders, found.gain))
    if not _any_unknown(ask, holders):
        return None
    found = bad_case(ask, holders)
    if found.worst > limits.bad_case.cap:
        return Reason("Slowdown", _too_slow, (found, ask, holders, limits.bad_case))
    return None


def _beside(holders: Sequence[Holder]) -> str:
    names = ", ".join(str(holder.key.task) for holder in holders)
    return f"beside task {names}" if len(holders) == 1 else f"beside tasks {names}"


def _too_slow(found: Forecast, ask: Ask, holders: Sequence[Holder], terms: Terms) -> str:
    """The new task and the slowest neighbour, if above the cap; and the tasks of unknown demand."""
    names = [f"task {holder.key.task}" for holder in found.holders]
    slowest, name = max(zip(found.slowdowns[:-1], names, strict=True))
    if found.own > terms.cap:
        sentence = f"{_beside(holders)} it would take {found.own:.2f} times as long as alone"
        sentence += f", {name} {slowest:.2f} times" if slowest > terms.cap else ""
    else:
        sentence = f"beside it {name} would take {slowest:.2f} times as long as alone"
    sentence += f" ({'limit' if terms.worst_case else 'cap'} {terms.cap:g})"
    every: list[tuple[str, Ask | Holder]] = [("it", ask), *zip(names, found.holders, strict=True)]
    return sentence + _assumed({name: one for name, one in every if one.demand is None}, terms)


def _assumed(unknown: Mapping[str, Ask | Holder], terms: Terms) -> str:
    if not unknown:
        return ""
    tasks, observed = " and ".join(unknown), [one.same_command is not None for one in unknown.values()]
    kind = "with the same command" if all(observed) else "of that size or command" if any(observed) else "of that size"
    if terms.worst_case:
        verb = "is" if len(unknown) == 1 else "are"
        return f" if {tasks} {verb} as demanding as the most demanding tenth of tasks {kind}; unknown yet"
    verb = "counts as a typical task" if len(unknown) == 1 else "count as typical tasks"
    return f"; {tasks} {verb} {kind}, since the demand is not known yet"


def _too_little(holders: Sequence[Holder], gain: float) -> str:
    if gain < 0.0:
        return f"{_beside(holders)} less would be done in all than without it (by {-gain:.2f} of a GPU's work)"
    return f"{_beside(holders)} it would add {gain:.2f} of a GPU's work in all (at least {MIN_GAIN:g} is wanted)"


def rank(predict: Predict, ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    found = [(predict(ask, view.holders), view) for view in views]
    found.sort(key=lambda entry: (-entry[0].gain, entry[1].gpu.index))
    return [
        Ranked(
            view.gpu.id,
            (
                Part("added_progress", round(one.gain, 4)),
                Part("own_slowdown", round(one.own, 3)),
                Part("largest_slowdown", round(one.worst, 3)),
            ),
        )
        for one, view in found
    ]


def urgent(waiting: Sequence[Waits], running_s: float, gpus: int) -> list[int]:
    """Tasks that would outlast all others if they waited any longer, the longest first: in their normal order they
    would run at the end, with most GPUs idle."""
    known = [waits.alone_s for waits in waiting if waits.alone_s is not None]
    mean_s = sum(known) / len(known) if known else 0.0
    work_s = sum(waits.gpus * (mean_s if waits.alone_s is None else waits.alone_s) for waits in waiting)
    drained_s = (running_s + work_s) / (gpus * SHARED_THROUGHPUT)
    late = [
        (-waits.alone_s, place)
        for place, waits in enumerate(waiting)
        if waits.alone_s is not None and waits.alone_s * LATE_FACTOR >= drained_s
    ]
    return [place for _, place in sorted(late)]


def bound(rules: Rules) -> Policy:
    limits = limits_of(rules)
    expected, bad_case = remembering(limits.expected), remembering(limits.bad_case)
    return replace(
        POLICY,
        rank=partial(rank, expected),
        objection=partial(objection, limits, expected, bad_case),
        urgent=urgent,
        joint_objection=partial(joint_objection, limits),
        bind=None,
    )


POLICY = Policy(
    "goodput",
    partial(rank, remembering(Terms(1.5, "mps"))),
    about="The GPU where it adds most progress, no task slowed down beyond a cap.",
    bind=bound,
    uses_gate=False,
)
