"""How those would fare who shared a GPU with a newcomer: what it adds to the progress of all, and how long each takes.

Pure arithmetic over the sharing model (sharing.py), from what is known of each: what it keeps busy alone, how far it
is, and how much of what was predicted is seen. Policies that predict build on it; it decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from carma.core.decision import Ask
from carma.core.model import Demand, Record
from carma.core.sharing import Mechanism, by_size, progress_rates
from carma.core.view import Holder

CLEARLY = 0.85  # less progress than this part of what was predicted: the prediction is off by that much now and then
SURE = 1.0 + 1e-9  # beyond what rounding may do


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


class GoesOn(NamedTuple):
    """Those on a GPU as they go on without a newcomer."""

    members: list[Member]
    progress: float  # of all of them
    missed: float  # how much of the progress that was predicted is seen


def goes_on(holders: Sequence[Holder], at: float, terms: Terms) -> GoesOn:
    members = [member_of(holder, at) for holder in holders]
    rates = rates_of(members, terms.mechanism)
    return GoesOn(members, sum(rates), missed_of(members, rates))


def outlook(ask: Ask, there: GoesOn, terms: Terms) -> Outlook:
    members, rates = _together(ask, there, terms)
    return Outlook(sum(rates) - there.progress, tuple(whole_runs(members, rates, terms)))


def _together(ask: Ask, there: GoesOn, terms: Terms) -> tuple[list[Member], list[float]]:
    """Those who would share the GPU, the newcomer last, and their rates at first."""
    newcomer = Member(asked_of(ask), inf if ask.alone_s is None else ask.alone_s)
    newcomer.is_wide = ask.gpus > 1
    members = [*there.members, newcomer]
    return members, [rate * there.missed for rate in rates_of(members, terms.mechanism)]


def plainly(ask: Ask, there: GoesOn, terms: Terms, least_gain: float) -> bool | None:
    """Whether the answer is a refusal, where that can be told from the rates at first; None where it cannot. Rates only
    rise as others end: nobody is slower than if none of them ever ended, nor faster than if all others ended with the
    first of them."""
    members, rates = _together(ask, there, terms)
    if sum(rates) - there.progress < least_gain:
        return True
    ends_s = [member.left_s / rate for member, rate in zip(members, rates, strict=True)]
    first_s, most = min(ends_s), 0.0
    for member, rate, end_s in zip(members, rates, ends_s, strict=True):
        if end_s == inf:
            if 1.0 / rate > terms.cap:
                return True
            continue
        least_s = first_s + max(0.0, member.left_s - rate * first_s)
        if member.spent_s + least_s > SURE * terms.cap * member.alone_s:
            return True
        most = max(most, (member.spent_s + end_s) / member.alone_s)
    return False if most * SURE <= terms.cap else None


def asked_of(ask: Ask) -> Demand:
    return by_size(ask.memory_mib) if ask.demand is None else ask.demand


def missed_of(members: Sequence[Member], rates: Sequence[float]) -> float:
    """How much of the progress that was predicted is seen, where it is clearly less; else all of it."""
    seen = min((member.seen / rate for member, rate in zip(members, rates, strict=True)), default=1.0)
    return seen if seen < CLEARLY else 1.0


def rates_of(members: Sequence[Member], mechanism: Mechanism) -> list[float]:
    rates = progress_rates([member.demand for member in members], mechanism)
    return [min(rate, member.elsewhere) for rate, member in zip(rates, members, strict=True)]


def member_of(holder: Holder, now: float) -> Member:
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
        rates = rates_of([members[place] for place in left], mechanism)
