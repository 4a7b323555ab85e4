"""Goodput: the GPU on which the task adds most progress in total, as long as no task is slowed down beyond a cap.

Progress is predicted by the sharing model (sharing.py) from what each task is known to keep busy when it runs alone. A
task of whom nothing is known counts as a demanding one of those that take as much memory. The cap is on a task's whole
run: one that had its GPU alone for an hour can bear a neighbour for a while. Where a neighbour would push anybody over
the cap, the task waits: a GPU is left alone when sharing it loses. And a task so long that it would outlast all others
goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from msgspec.structs import replace

from carma.core.decision import Ask, Part, Refusal
from carma.core.model import Demand, GpuId, Record
from carma.core.policy import Move, Policy, Ranked, Waits
from carma.core.settings import Rules
from carma.core.sharing import Mechanism, by_size, progress_rates
from carma.core.view import GpuView, Holder

LEAST_GAIN = 0.2  # of a GPU's work: less is not worth what it costs those who share
CLEARLY = 0.85  # less progress than this part of what was predicted: the prediction is off by that much now and then
THROUGHPUT = 1.3  # of a shared GPU, alone 1: to reckon how long it takes until all is done
MOST_KEPT = 4096  # sets of holders of which something is kept
LATE = 1.2  # a task is late if it would take so much longer than alone and then end after all others


class Terms(Record, frozen=True):
    cap: float
    mechanism: Mechanism


class Member:
    """One that shares the GPU, as it would go on."""

    __slots__ = ("alone_s", "demand", "elsewhere", "is_wide", "left_s", "seen", "spent_s")

    def __init__(
        self, demand: Demand, alone_s: float, done_s: float = 0.0, spent_s: float = 0.0, elsewhere: float = 1.0
    ) -> None:
        self.demand = demand
        self.alone_s = alone_s
        self.left_s = max(1.0, alone_s - done_s)  # one that overran what was said of it may end at any time
        self.spent_s = spent_s
        self.elsewhere = elsewhere  # the rate that its other GPUs allow
        self.is_wide = False  # it has others
        self.seen = 1.0  # its rate as it is seen


class Outlook(Record, frozen=True):
    """What is predicted for a GPU if the task comes to it."""

    gain: float  # progress of all, less what those there make by themselves
    slow: tuple[float, ...]  # how many times as long as alone each takes over its whole run, the newcomer last

    @property
    def own(self) -> float:
        return self.slow[-1]

    @property
    def worst(self) -> float:
        return max(self.slow)


ALONE = Outlook(1.0, (1.0,))
Question = tuple[float, float | None, Demand, bool]  # as of when, run time alone, demand, on several GPUs
Answer = tuple[Outlook, Refusal | None]


class Known:
    """What was worked out for some holders, kept for as long as they are the very same: policies are asked again and
    again. It changes no answer."""

    __slots__ = ("_by_holders", "_terms")

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._by_holders: dict[int, tuple[Sequence[Holder], dict[Question, Answer]]] = {}

    def of(self, ask: Ask, holders: Sequence[Holder]) -> Answer:
        kept = self._by_holders.get(id(holders))
        if kept is None or kept[0] is not holders:
            if len(self._by_holders) >= MOST_KEPT:
                self._by_holders.clear()
            kept = self._by_holders[id(holders)] = (holders, {})
        key = (ask.at, ask.alone_s, _asked(ask), ask.gpus > 1)
        found = kept[1].get(key)
        if found is None:
            seen = outlook(ask, holders, self._terms) if holders else ALONE
            found = kept[1][key] = (seen, refusal(seen, ask, holders, self._terms.cap))
        return found


def outlook(ask: Ask, holders: Sequence[Holder], terms: Terms) -> Outlook:
    members = [_member(holder, ask.at) for holder in holders]
    before = _rates(members, terms.mechanism)
    missed = _missed(members, before)
    members.append(Member(_asked(ask), inf if ask.alone_s is None else ask.alone_s))
    members[-1].is_wide = ask.gpus > 1
    after = [rate * missed for rate in _rates(members, terms.mechanism)]
    slow = whole_runs(members, after, terms)
    return Outlook(sum(after) - sum(before), tuple(slow))


def _asked(ask: Ask) -> Demand:
    return by_size(ask.memory_mib) if ask.demand is None else ask.demand


def _missed(members: Sequence[Member], rates: Sequence[float]) -> float:
    """How much of the progress that was predicted is seen, where it is clearly less; else all of it."""
    seen = min((member.seen / rate for member, rate in zip(members, rates, strict=True)), default=1.0)
    return seen if seen < CLEARLY else 1.0


def _rates(members: Sequence[Member], mechanism: Mechanism) -> list[float]:
    rates = progress_rates([member.demand for member in members], mechanism)
    return [min(rate, member.elsewhere) for rate, member in zip(rates, members, strict=True)]


def _member(holder: Holder, now: float) -> Member:
    progress = holder.progress
    demand = by_size(holder.counted_mib) if holder.demand is None else holder.demand
    if progress is None:
        return Member(demand, inf)
    alone_s = inf if progress.alone_s is None else progress.alone_s
    then = max(now, progress.at)  # a question may be of a little while ago (policy.as_of)
    spent_s = max(0.0, then - progress.began_at)
    member = Member(demand, alone_s, progress.done_by(then), spent_s, progress.elsewhere)
    member.seen = progress.rate
    member.is_wide = progress.is_wide
    return member


def whole_runs(members: Sequence[Member], rates: Sequence[float], terms: Terms) -> list[float]:
    """How many times as long as alone each takes in all. Somebody who comes to another GPU of a wide task holds it up
    here, too: the others must bear it for as long as its own cap lets it stay."""
    found = slowdowns(members, rates, terms.mechanism)
    if len(members) > 1 and any(member.is_wide for member in members):
        lefts = [_stays(member, rate, terms.cap) for member, rate in zip(members, rates, strict=True)]
        longer = slowdowns(members, rates, terms.mechanism, lefts)
        found = [own if member.is_wide else late for member, own, late in zip(members, found, longer, strict=True)]
    return found


def _stays(member: Member, rate: float, cap: float) -> float:
    """What it would have left to do at that rate if it stayed until its cap."""
    return max(member.left_s, rate * (cap * member.alone_s - member.spent_s)) if member.is_wide else member.left_s


def slowdowns(
    members: Sequence[Member], rates: Sequence[float], mechanism: Mechanism, lefts: Sequence[float] | None = None
) -> list[float]:
    """Of each over its whole run, if nobody else comes: those who end leave the others more room. One whose end is
    not known is taken to go on as it begins. `lefts`: what each has left to do, where that is not what it says."""
    found = [1.0 / rate for rate in rates]
    left = dict(enumerate([member.left_s for member in members] if lefts is None else lefts))
    at = 0.0
    while True:
        ends = [(left[place] / rate, place) for place, rate in zip(left, rates, strict=True) if left[place] < inf]
        if not ends:
            return found
        step_s, first = min(ends)
        at += step_s
        for place, rate in zip(left, rates, strict=True):
            left[place] -= step_s * rate
        member = members[first]
        found[first] = (member.spent_s + at) / member.alone_s
        del left[first]
        rates = _rates([members[place] for place in left], mechanism)


def against(known: Known, ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
    return known.of(ask, holders)[1]


def refusal(found: Outlook, ask: Ask, holders: Sequence[Holder], cap: float) -> Refusal | None:
    if found.worst > cap:
        return Refusal("Slowdown", _too_slow(found, ask, holders, cap))
    if found.gain < LEAST_GAIN:
        return Refusal("Slowdown", f"{_beside(holders)} {_too_little(found.gain)}")
    return None


def _beside(holders: Sequence[Holder]) -> str:
    names = ", ".join(str(holder.key.task) for holder in holders)
    return f"beside task {names}" if len(holders) == 1 else f"beside tasks {names}"


def _too_slow(found: Outlook, ask: Ask, holders: Sequence[Holder], cap: float) -> str:
    """The newcomer and the worst of the others, as far as the cap is against them; and who is only taken to be busy."""
    names = [f"task {holder.key.task}" for holder in holders]
    slowest, name = max(zip(found.slow[:-1], names, strict=True))
    if found.own > cap:
        told = f"{_beside(holders)} it would take {found.own:.2f} times as long as alone"
        told += f", {name} {slowest:.2f} times" if slowest > cap else ""
    else:
        told = f"beside it {name} would take {slowest:.2f} times as long as alone"
    unknown = [who for who, one in zip(names, holders, strict=True) if one.demand is None]
    return f"{told} (cap {cap:g}){_guessed(unknown if ask.demand is not None else ['it', *unknown])}"


def _guessed(unknown: Sequence[str]) -> str:
    if not unknown:
        return ""
    counts, its = ("counts", "its") if len(unknown) == 1 else ("count", "their")
    return f"; {' and '.join(unknown)} {counts} as busy as tasks of {its} size get, since that is not known yet"


def _too_little(gain: float) -> str:
    if gain < 0.0:
        return f"less would be done in all than without it (by {-gain:.2f} of a GPU's work)"
    return f"it would add {gain:.2f} of a GPU's work in all (at least {LEAST_GAIN:g} is wanted)"


def rank(known: Known, ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    found = [(known.of(ask, view.holders)[0], view) for view in views]
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
        members = [_member(holder, view.newest.at) for holder in view.holders]
        missed = _missed(members, _rates(members, terms.mechanism))
        seen = [member.seen for member in members]
        worst = max(whole_runs(members, seen, terms))
        if missed < 1.0 and worst > terms.cap:
            newest = max(view.holders, key=lambda holder: holder.key)
            less = f"{100 * missed:.0f} % of the progress that was predicted"
            slow = f"somebody would take {worst:.2f} times as long as alone (cap {terms.cap:g})"
            found.append(Move(newest.key.task, f"those who share its GPU make {less}, and {slow}"))
    return found


def bound(rules: Rules) -> Policy:
    terms = Terms(rules.placement.slowdown_cap, "timeslice" if rules.sharing.mechanism == "timeslice" else "mps")
    known = Known(terms)
    return replace(
        POLICY,
        rank=partial(rank, known),
        against=partial(against, known),
        urgent=urgent,
        moves=partial(moves, terms),
        bind=None,
    )


POLICY = Policy(
    "goodput",
    partial(rank, Known(Terms(1.25, "mps"))),
    about="The GPU where it adds most progress, nobody slowed down beyond a cap.",
    bind=bound,
    gated=False,
)
