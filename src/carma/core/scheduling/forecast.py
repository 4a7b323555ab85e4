"""Forecast of a shared GPU: the progress that a new task adds in total, and the slowdown of each task.

Pure arithmetic over the sharing model (sharing_model.py), from each task's demand, its progress, and how much of the
predicted progress is observed. Policies that predict use it; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from carma.core.model.decision import Ask
from carma.core.model.values import AttemptKey, Correction, Demand, GpuId, Record
from carma.core.scheduling.gpu_view import Holder
from carma.core.scheduling.sharing_model import Mechanism, by_size, demanding, progress_rates, typical

CLEARLY_LESS = 0.85  # observed / predicted progress below which the observation counts; predictions vary as much
ROUNDING = 1.0 + 1e-9  # factor beyond rounding errors


class Terms(Record, frozen=True):
    cap: float
    mechanism: Mechanism
    worst_case: bool = False  # a task of unknown demand counts as demanding for its memory size, not as typical

    def demand_of(self, known: Demand | None, memory_mib: int, same_command: Demand | None = None) -> Demand:
        if known is not None:
            return known
        if same_command is not None:
            return demanding(same_command) if self.worst_case else same_command
        return by_size(memory_mib) if self.worst_case else typical(memory_mib)


class Sharer:
    """A task on a shared GPU, from now on."""

    __slots__ = ("alone_s", "correction", "demand", "elsewhere", "left_s", "observed_rate", "spent_s")

    def __init__(
        self,
        demand: Demand,
        alone_s: float,
        done_s: float = 0.0,
        spent_s: float = 0.0,
        elsewhere: float = 1.0,
        correction: Correction | None = None,
    ) -> None:
        self.demand = demand
        self.correction = correction
        self.alone_s = alone_s
        self.left_s = max(1.0, alone_s - done_s)  # a task that overran its estimate may end at any time
        self.spent_s = spent_s
        self.elsewhere = elsewhere  # the rate that its other GPUs allow
        self.observed_rate = 1.0


class Forecast(Record, frozen=True):
    """Prediction for a GPU if the task joins it."""

    gain: float  # progress of all tasks, less the progress without the new task
    slowdowns: tuple[float, ...]  # of the whole run of each task, the new task last
    holders: tuple[Holder, ...] = ()  # the tasks of `slowdowns`, without the new task

    @property
    def own(self) -> float:
        return self.slowdowns[-1]

    @property
    def worst(self) -> float:
        return max(self.slowdowns)


ALONE = Forecast(1.0, (1.0,))


Group = list[tuple[int, Demand]]  # the tasks on one GPU: position among all tasks, and demand there


class Baseline(NamedTuple):
    """The tasks on some GPUs without the new task. Tasks on the other GPUs of multi-GPU tasks are included: they slow
    each other down."""

    holders: tuple[Holder, ...]
    members: list[Sharer]
    here: int  # number of tasks on the requested GPUs; they come first
    groups: list[Group]  # the requested GPUs come first
    requested: int  # number of requested GPUs
    progress: float  # of all tasks on the requested GPUs
    ratio: float  # observed / predicted progress on the requested GPUs


def baseline(gpus: Sequence[Sequence[Holder]], at: float, terms: Terms) -> Baseline:
    """`gpus`: the holders of each requested GPU."""
    places: dict[AttemptKey, int] = {}
    holders: list[Holder] = []

    def group(sharing: Sequence[Holder]) -> Group:
        for holder in sharing:
            if holder.key not in places:
                places[holder.key] = len(holders)
                holders.append(holder)
        return [(places[holder.key], _held(holder, terms)) for holder in sharing]

    groups = [group(sharing) for sharing in gpus]
    here = len(holders)
    others: dict[GpuId, Group] = {}
    for holder in holders[:here]:
        for known in holder.other_gpus:
            if known.gpu not in others:
                others[known.gpu] = group((*known.holders, replace(holder, demand=known.demand)))
    members = [sharer_of(holder, at, terms) for holder in holders]
    for holder, member in zip(holders[:here], members, strict=False):
        if holder.other_gpus:
            member.elsewhere = 1.0  # all its GPUs are included
    groups.extend(others.values())
    rates = rates_in(members, groups, terms.mechanism)
    ratio = progress_ratio(members[:here], rates[:here])
    requested = len(gpus)
    return Baseline(tuple(holders), members, here, groups, requested, _sum(groups[:requested], rates), ratio)


def forecast(ask: Ask, there: Baseline, terms: Terms) -> Forecast:
    members, groups, rates = _together(ask, there, terms)
    slow = slowdowns(members, rates, terms.mechanism, groups)
    holders = there.holders
    if there.here < len(holders):
        counted = [place for place in range(len(holders)) if place < there.here or _pays(there, place, slow, terms)]
        slow, holders = [*(slow[place] for place in counted), slow[-1]], tuple([holders[place] for place in counted])
    return Forecast(_sum(groups[: there.requested], rates) - there.progress, tuple(slow), holders)


def _pays(there: Baseline, place: int, slow: Sequence[float], terms: Terms) -> bool:
    """Whether a task on another GPU takes longer with the new task than without."""
    rates = rates_in(there.members, there.groups, terms.mechanism)
    return slow[place] > ROUNDING * slowdowns(there.members, rates, terms.mechanism, there.groups)[place]


def _sum(groups: Sequence[Group], rates: Sequence[float]) -> float:
    return sum([rates[place] for group in groups for place, _ in group])


def _together(ask: Ask, there: Baseline, terms: Terms) -> tuple[list[Sharer], list[Group], list[float]]:
    """The tasks on the GPUs, the new task last, and their initial rates."""
    demand, last = asked_of(ask, terms), len(there.members)
    alone_s = inf if ask.alone_s is None else ask.alone_s
    members = [*there.members, Sharer(demand, alone_s, correction=ask.correction)]
    groups = [[*each, (last, demand)] if place < there.requested else each for place, each in enumerate(there.groups)]
    rates = rates_in(members, groups, terms.mechanism)
    return members, groups, rates if there.ratio == 1.0 else [rate * there.ratio for rate in rates]


def asked_of(ask: Ask, terms: Terms) -> Demand:
    return terms.demand_of(ask.demand, ask.memory_mib, ask.same_command)


def _held(holder: Holder, terms: Terms) -> Demand:
    return terms.demand_of(holder.demand, holder.counted_mib, holder.same_command)


def progress_ratio(members: Sequence[Sharer], rates: Sequence[float]) -> float:
    """Observed / predicted progress, where it is clearly below 1; else 1."""
    ratio = min((member.observed_rate / rate for member, rate in zip(members, rates, strict=True)), default=1.0)
    return ratio if ratio < CLEARLY_LESS else 1.0


def rates_of(members: Sequence[Sharer], mechanism: Mechanism) -> list[float]:
    """Progress rates of tasks on one GPU."""
    return rates_in(members, [_all(members)], mechanism)


def _all(members: Sequence[Sharer]) -> Group:
    return [(place, member.demand) for place, member in enumerate(members)]


def rates_in(members: Sequence[Sharer], groups: Sequence[Group], mechanism: Mechanism) -> list[float]:
    """A task in several groups has the rate of the slowest."""
    found = [member.elsewhere for member in members]
    for group in groups:
        corrections = [members[place].correction for place, _ in group]
        rates = progress_rates([demand for _, demand in group], mechanism, corrections=corrections)
        for (place, _), rate in zip(group, rates, strict=True):
            if rate < found[place]:
                found[place] = rate
    return found


def demand_of(holder: Holder) -> Demand:
    """Its demand; unknown, that of a demanding task of its memory size."""
    return by_size(holder.counted_mib) if holder.demand is None else holder.demand


def sharer_of(holder: Holder, now: float, terms: Terms) -> Sharer:
    progress = holder.progress
    demand = _held(holder, terms)
    if progress is None:
        return Sharer(demand, inf, correction=holder.correction)
    alone_s = inf if progress.alone_s is None else progress.alone_s
    then = max(now, progress.at)  # the time of a question is rounded down (policy.as_of)
    spent_s = max(0.0, then - progress.began_at)
    member = Sharer(demand, alone_s, progress.done_by(then), spent_s, progress.elsewhere, holder.correction)
    member.observed_rate = progress.rate
    return member


def slowdowns(
    members: Sequence[Sharer], rates: Sequence[float], mechanism: Mechanism, groups: Sequence[Group] | None = None
) -> list[float]:
    """Slowdown of each task over its whole run, if no other task comes; the others speed up when a task ends. A task of
    unknown run time keeps its initial rate. `groups`: the tasks of each GPU; None: all share one GPU."""
    found = [1.0 / rate for rate in rates]
    left = [member.left_s for member in members]
    running = list(range(len(members)))
    among = [_all(members)] if groups is None else groups
    at, now = 0.0, list(rates)
    while True:
        ends = [(left[place] / now[place], place) for place in running if left[place] < inf]
        if not ends:
            return found
        step_s, first = min(ends)
        at += step_s
        for place in running:
            left[place] -= step_s * now[place]
        member = members[first]
        found[first] = (member.spent_s + at) / member.alone_s
        running = [place for place in running if place != first]
        among = [[one for one in group if one[0] != first] for group in among]
        now = rates_in(members, among, mechanism)
