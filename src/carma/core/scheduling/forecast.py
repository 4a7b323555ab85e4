"""How those would fare who shared a GPU with a newcomer: what it adds to the progress of all, and how long each takes.

Pure arithmetic over the sharing model (sharing.py), from what is known of each: what it keeps busy alone, how far it
is, and how much of what was predicted is seen. Policies that predict build on it; it decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from carma.core.model.values import AttemptKey, Demand, GpuId, Record
from carma.core.scheduling.decision import Ask
from carma.core.scheduling.gpu_view import Holder
from carma.core.scheduling.sharing_model import Mechanism, by_size, progress_rates

CLEARLY = 0.85  # less progress than this part of what was predicted: the prediction is off by that much now and then
SURE = 1.0 + 1e-9  # beyond what rounding may do


class Terms(Record, frozen=True):
    cap: float
    mechanism: Mechanism


class Member:
    """One that shares the GPU, as it would go on."""

    __slots__ = ("alone_s", "demand", "elsewhere", "left_s", "seen", "spent_s")

    def __init__(
        self, demand: Demand, alone_s: float, done_s: float = 0.0, spent_s: float = 0.0, elsewhere: float = 1.0
    ) -> None:
        self.demand = demand
        self.alone_s = alone_s
        self.left_s = max(1.0, alone_s - done_s)  # one that overran what was said of it may end at any time
        self.spent_s = spent_s
        self.elsewhere = elsewhere  # the rate that its other GPUs allow
        self.seen = 1.0  # its rate as it is seen


class Outlook(Record, frozen=True):
    """What is predicted for a GPU if the task comes to it."""

    gain: float  # progress of all, less what those there make by themselves
    slow: tuple[float, ...]  # how many times as long as alone each takes over its whole run, the newcomer last
    whose: tuple[Holder, ...] = ()  # those figures are, but for the last

    @property
    def own(self) -> float:
        return self.slow[-1]

    @property
    def worst(self) -> float:
        return max(self.slow)


ALONE = Outlook(1.0, (1.0,))


Group = list[tuple[int, Demand]]  # those who share one GPU, by place, and what each would keep busy there alone


class GoesOn(NamedTuple):
    """Those on some GPUs as they go on without a newcomer; and those on the other GPUs of the wide ones among them, who
    hold each other up."""

    holders: tuple[Holder, ...]
    members: list[Member]
    here: int  # so many of them, the first, are on the GPUs that are asked about
    groups: list[Group]  # the GPUs that are asked about first
    asked: int  # so many of them
    progress: float  # of all on the GPUs that are asked about
    missed: float  # how much of the progress that was predicted is seen there


def goes_on(companies: Sequence[Sequence[Holder]], at: float, terms: Terms) -> GoesOn:
    """`companies`: the holders of each GPU that is asked about."""
    places: dict[AttemptKey, int] = {}
    holders: list[Holder] = []

    def group(company: Sequence[Holder]) -> Group:
        for holder in company:
            if holder.key not in places:
                places[holder.key] = len(holders)
                holders.append(holder)
        return [(places[holder.key], demand_of(holder)) for holder in company]

    groups = [group(company) for company in companies]
    here = len(holders)
    others: dict[GpuId, Group] = {}
    for holder in holders[:here]:
        for known in holder.beside:
            if known.gpu not in others:
                others[known.gpu] = group((*known.holders, replace(holder, demand=known.demand)))
    members = [member_of(holder, at) for holder in holders]
    for holder, member in zip(holders[:here], members, strict=False):
        if holder.beside:
            member.elsewhere = 1.0  # all its GPUs are looked at
    groups.extend(others.values())
    rates = rates_in(members, groups, terms.mechanism)
    missed = missed_of(members[:here], rates[:here])
    asked = len(companies)
    return GoesOn(tuple(holders), members, here, groups, asked, _sum(groups[:asked], rates), missed)


def outlook(ask: Ask, there: GoesOn, terms: Terms) -> Outlook:
    members, groups, rates = _together(ask, there, terms)
    slow = slowdowns(members, rates, terms.mechanism, groups)
    whose = there.holders
    if there.here < len(whose):
        counted = [place for place in range(len(whose)) if place < there.here or _pays(there, place, slow, terms)]
        slow, whose = [*(slow[place] for place in counted), slow[-1]], tuple([whose[place] for place in counted])
    return Outlook(_sum(groups[: there.asked], rates) - there.progress, tuple(slow), whose)


def _pays(there: GoesOn, place: int, slow: Sequence[float], terms: Terms) -> bool:
    """Whether one on another GPU takes longer with the newcomer than without."""
    rates = rates_in(there.members, there.groups, terms.mechanism)
    return slow[place] > SURE * slowdowns(there.members, rates, terms.mechanism, there.groups)[place]


def _sum(groups: Sequence[Group], rates: Sequence[float]) -> float:
    return sum([rates[place] for group in groups for place, _ in group])


def _together(ask: Ask, there: GoesOn, terms: Terms) -> tuple[list[Member], list[Group], list[float]]:
    """Those who would share the GPUs, the newcomer last, and their rates at first."""
    members = [*there.members, Member(asked_of(ask), inf if ask.alone_s is None else ask.alone_s)]
    last = len(there.members)
    groups = [
        [*each, (last, asked_of(ask))] if place < there.asked else each for place, each in enumerate(there.groups)
    ]
    rates = rates_in(members, groups, terms.mechanism)
    return members, groups, rates if there.missed == 1.0 else [rate * there.missed for rate in rates]


def asked_of(ask: Ask) -> Demand:
    return by_size(ask.memory_mib) if ask.demand is None else ask.demand


def missed_of(members: Sequence[Member], rates: Sequence[float]) -> float:
    """How much of the progress that was predicted is seen, where it is clearly less; else all of it."""
    seen = min((member.seen / rate for member, rate in zip(members, rates, strict=True)), default=1.0)
    return seen if seen < CLEARLY else 1.0


def rates_of(members: Sequence[Member], mechanism: Mechanism) -> list[float]:
    """Of those on one GPU."""
    return rates_in(members, [_all(members)], mechanism)


def _all(members: Sequence[Member]) -> Group:
    return [(place, member.demand) for place, member in enumerate(members)]


def rates_in(members: Sequence[Member], groups: Sequence[Group], mechanism: Mechanism) -> list[float]:
    """One that is in several groups goes at the pace of the slowest."""
    found = [member.elsewhere for member in members]
    for group in groups:
        rates = progress_rates([demand for _, demand in group], mechanism)
        for (place, _), rate in zip(group, rates, strict=True):
            if rate < found[place]:
                found[place] = rate
    return found


def demand_of(holder: Holder) -> Demand:
    return by_size(holder.counted_mib) if holder.demand is None else holder.demand


def member_of(holder: Holder, now: float) -> Member:
    progress = holder.progress
    demand = demand_of(holder)
    if progress is None:
        return Member(demand, inf)
    alone_s = inf if progress.alone_s is None else progress.alone_s
    then = max(now, progress.at)  # a question may be of a little while ago (policy.as_of)
    spent_s = max(0.0, then - progress.began_at)
    member = Member(demand, alone_s, progress.done_by(then), spent_s, progress.elsewhere)
    member.seen = progress.rate
    return member


def slowdowns(
    members: Sequence[Member], rates: Sequence[float], mechanism: Mechanism, groups: Sequence[Group] | None = None
) -> list[float]:
    """Of each over its whole run, if nobody else comes: those who end leave the others more room. One whose end is
    not known is taken to go on as it begins. `groups`: who shares a GPU with whom; None: all share one."""
    found = [1.0 / rate for rate in rates]
    left = [member.left_s for member in members]
    there = list(range(len(members)))  # still
    among = [_all(members)] if groups is None else groups
    at, now = 0.0, list(rates)
    while True:
        ends = [(left[place] / now[place], place) for place in there if left[place] < inf]
        if not ends:
            return found
        step_s, first = min(ends)
        at += step_s
        for place in there:
            left[place] -= step_s * now[place]
        member = members[first]
        found[first] = (member.spent_s + at) / member.alone_s
        there = [place for place in there if place != first]
        among = [[one for one in group if one[0] != first] for group in among]
        now = rates_in(members, among, mechanism)
