"""Goodput: the GPU on which the task adds most progress in total, as long as no task is slowed down beyond a cap.

Progress is predicted by the sharing model (sharing.py) from what each task is known to keep busy when it runs alone. A
task of whom nothing is known counts as a demanding one of those that take as much memory. The cap is on a task's whole
run: one that had its GPU alone for an hour can bear a neighbour for a while. Where a neighbour would push anybody over
the cap, the task waits: a GPU is left alone when sharing it loses. And a task so long that it would outlast all others
goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, TaskId
from carma.core.scheduling.decision import Ask, Part, Reason
from carma.core.scheduling.forecast import (
    ALONE,
    GoesOn,
    Outlook,
    Terms,
    asked_of,
    goes_on,
    member_of,
    missed_of,
    outlook,
    rates_of,
    slowdowns,
)
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Move, Policy, Ranked, Waits

LEAST_GAIN = 0.2  # of a GPU's work: less is not worth what it costs those who share
THROUGHPUT = 1.3  # of a shared GPU, alone 1: to reckon how long it takes until all is done
MOST_KEPT = 4096  # predictions that are remembered
LATE = 1.2  # a task is late if it would take so much longer than alone and then end after all others


Predict = Callable[[Ask, Sequence[Holder]], Outlook]
"""What is predicted if the task joins those holders."""


def remembering(terms: Terms) -> Predict:
    """Answers are remembered by all that they depend on: the same questions are asked in every pass."""

    @lru_cache(MOST_KEPT)
    def undisturbed(holders: tuple[Holder, ...], at: float) -> GoesOn:
        return goes_on([holders], at, terms)

    @lru_cache(MOST_KEPT)
    def answer(question: Ask, holders: tuple[Holder, ...]) -> Outlook:
        return outlook(question, undisturbed(holders, question.at), terms)

    def predict(ask: Ask, holders: Sequence[Holder]) -> Outlook:
        if not holders:
            return ALONE
        question = Ask(TaskId(0), 1, 0, "", demand=asked_of(ask), alone_s=ask.alone_s, at=ask.at)
        return answer(question, tuple(holders))

    return predict


def joint_objection(terms: Terms, ask: Ask, companies: Sequence[Sequence[Holder]]) -> Reason | None:
    """For a task with several GPUs: it goes at the pace of the slowest, which is not always the same."""
    found = outlook(ask, goes_on(companies, ask.at, terms), terms)
    holders = list({holder.key: holder for company in companies for holder in company}.values())
    return Reason("Slowdown", _too_slow, (found, ask, holders, terms.cap)) if found.worst > terms.cap else None


def objection(predict: Predict, cap: float, ask: Ask, holders: Sequence[Holder]) -> Reason | None:
    return refusal(predict(ask, holders), ask, holders, cap)


def refusal(found: Outlook, ask: Ask, holders: Sequence[Holder], cap: float) -> Reason | None:
    if found.worst > cap:
        return Reason("Slowdown", _too_slow, (found, ask, holders, cap))
    if found.gain < LEAST_GAIN:
        return Reason("Slowdown", _too_little, (holders, found.gain))
    return None


def _beside(holders: Sequence[Holder]) -> str:
    names = ", ".join(str(holder.key.task) for holder in holders)
    return f"beside task {names}" if len(holders) == 1 else f"beside tasks {names}"


def _too_slow(found: Outlook, ask: Ask, holders: Sequence[Holder], cap: float) -> str:
    """The newcomer and the worst of the others, as far as the cap is against them; and who is only taken to be busy."""
    names = [f"task {holder.key.task}" for holder in found.whose]
    slowest, name = max(zip(found.slow[:-1], names, strict=True))
    if found.own > cap:
        told = f"{_beside(holders)} it would take {found.own:.2f} times as long as alone"
        told += f", {name} {slowest:.2f} times" if slowest > cap else ""
    else:
        told = f"beside it {name} would take {slowest:.2f} times as long as alone"
    unknown = [who for who, one in zip(names, found.whose, strict=True) if one.demand is None]
    return f"{told} (cap {cap:g}){_guessed(unknown if ask.demand is not None else ['it', *unknown])}"


def _guessed(unknown: Sequence[str]) -> str:
    if not unknown:
        return ""
    counts, its = ("counts", "its") if len(unknown) == 1 else ("count", "their")
    return f"; {' and '.join(unknown)} {counts} as busy as tasks of {its} size get, since that is not known yet"


def _too_little(holders: Sequence[Holder], gain: float) -> str:
    if gain < 0.0:
        return f"{_beside(holders)} less would be done in all than without it (by {-gain:.2f} of a GPU's work)"
    return f"{_beside(holders)} it would add {gain:.2f} of a GPU's work in all (at least {LEAST_GAIN:g} is wanted)"


def rank(predict: Predict, ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    found = [(predict(ask, view.holders), view) for view in views]
    found.sort(key=lambda entry: (-entry[0].gain, entry[1].gpu.index))
    return [
        Ranked(
            view.gpu.id,
            (
                Part("gain", round(seen.gain, 4)),
                Part("own_slowdown", round(seen.own, 3)),
                Part("worst_slowdown", round(seen.worst, 3)),
            ),
        )
        for seen, view in found
    ]


def urgent(waiting: Sequence[Waits], running_s: float, gpus: int) -> list[int]:
    """Those that would outlast all the rest if they waited any longer, the longest first: left to their turn, they
    would run at the end with most GPUs idle."""
    known = [waits.alone_s for waits in waiting if waits.alone_s is not None]
    guess_s = sum(known) / len(known) if known else 0.0
    work_s = sum(waits.gpus * (guess_s if waits.alone_s is None else waits.alone_s) for waits in waiting)
    drained_s = (running_s + work_s) / (gpus * THROUGHPUT)
    late = [
        (-waits.alone_s, place)
        for place, waits in enumerate(waiting)
        if waits.alone_s is not None and waits.alone_s * LATE >= drained_s
    ]
    return [place for _, place in sorted(late)]


def moves(terms: Terms, views: Sequence[GpuView]) -> list[Move]:
    """The newest on each GPU where clearly less progress is made than was predicted, and too little by the cap."""
    found: list[Move] = []
    for view in views:
        if len(view.holders) < 2 or view.newest is None or any(holder.warming is not None for holder in view.holders):
            continue
        members = [member_of(holder, view.newest.at) for holder in view.holders]
        missed = missed_of(members, rates_of(members, terms.mechanism))
        seen = [member.seen for member in members]
        worst = max(slowdowns(members, seen, terms.mechanism))
        if missed < 1.0 and worst > terms.cap:
            newest = max(view.holders, key=lambda holder: holder.key)
            less = f"{100 * missed:.0f} % of the progress that was predicted"
            slow = f"somebody would take {worst:.2f} times as long as alone (cap {terms.cap:g})"
            found.append(Move(newest.key.task, f"those who share its GPU make {less}, and {slow}"))
    return found


def bound(rules: Rules) -> Policy:
    terms = Terms(rules.placement.slowdown_cap, "timeslice" if rules.sharing.mechanism == "timeslice" else "mps")
    predict = remembering(terms)
    return replace(
        POLICY,
        rank=partial(rank, predict),
        objection=partial(objection, predict, terms.cap),
        urgent=urgent,
        moves=partial(moves, terms),
        joint_objection=partial(joint_objection, terms),
        bind=None,
    )


POLICY = Policy(
    "goodput",
    partial(rank, remembering(Terms(1.25, "mps"))),
    about="The GPU where it adds most progress, nobody slowed down beyond a cap.",
    bind=bound,
    uses_gate=False,
)
