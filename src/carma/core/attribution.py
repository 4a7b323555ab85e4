"""Whose activity and whose energy? No driver tells how much of a shared GPU's SM activity each process causes, so it is
worked out from what was seen of each attempt.

An attempt that has a GPU alone has all of it. Where several hold it, shares are in proportion to what each is thought
to do by itself, and every sample corrects those guesses (a Kalman filter that keeps no correlations). Activities do not
add up: tasks get in each other's way, and no GPU is more than full. But the idle parts of tasks that know nothing of
each other multiply, so what is added up is the pressure -ln(1 - activity). A sample's error is shared out by how little
is known of each: one that is alone takes all of it, a newcomer takes most, and when somebody leaves the others are
corrected by what is left. Those who start in the same second cannot be told apart until one of them leaves, or its
memory shows that it begins; and little is learnt on a full GPU. A slow-down that all suffer nearly cancels out. Where
the sampler tells the activity of every process, that is used instead. Foreign processes have a share too, which is
nobody's.

A span between two samples counts whole for those who hold memory at its end: the last part of a run is missed, and the
first is counted from the sample before, which evens out.

What is shared out is the energy above what the GPU takes idle: the lowest mean power of five samples in a row with
nobody on it. Until there are five in a row, the lowest single one counts. While the GPU was never seen empty, half of
the lowest power seen is taken for idle: all of it would leave a task that always does the same with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from operator import attrgetter

from carma.core import pace
from carma.core.model import Activity, AttemptKey, GpuId, GpuSample, GpuUsage, ProcessUse, Record
from carma.core.seen import NEW_VARIANCE, POWER_SAMPLES, Guess, Live, Track
from carma.core.seen import Member as Member
from carma.core.snapshot import HIDDEN_MIB
from carma.core.state import State
from carma.core.status import Running
from carma.core.usage import HOUR_S
from carma.core.window import given

METRICS = Activity.__struct_fields__
_figures = attrgetter(*METRICS)

NOISE = 0.05  # the error of a reading, as a part of it: steps and samples do not keep time with each other
SLACK = 0.02  # no GPU is taken to be fuller than all but this: the pressure of a full one would have no end
YOUNG_S = 20.0  # how fast one is no longer new, from its first use or last growth: start-ups take 8 to 55 s
DRIFT = 0.01  # variance for each second, as a part of the pressure squared: phases and neighbours change what one does
SMALL = 0.1  # the least that noise and drift are counted of, so that one thought to do nothing can be seen to wake up
DOUBT = 0.2  # nobody weighs less than this part of the guess's spread: no nothing for one of whom little is known


class Members(Record, frozen=True):
    """Who was on a GPU when a sample was taken."""

    present: list[Member]  # they hold memory there
    resting: list[Member]  # they did before, and hold none now
    foreign: bool
    nobody: bool  # neither present nor foreign


Held = Mapping[AttemptKey, int | None]  # MiB of each attempt that a sample shows


def share_out(
    state: State, live: Live, holders: Sequence[Member], held: Held, before: GpuSample | None, sample: GpuSample
) -> None:
    """What happened since the sample before: to each of its holders its share, and to the GPU's hour the whole."""
    if sample.fault is not None:
        return
    members = _members(state, holders, held, sample)
    # After a gap nobody knows who was there: the span since the sample before tells nothing.
    gap = before is None or before.fault is not None or sample.at - before.at > state.rules.window.stale_s
    watched = None if gap else before
    _note_power(state, live, members, watched, sample)
    if watched is None:
        return
    span_s, active = sample.at - watched.at, given(sample, "sm_active")
    _learn(live, members, sample.at, active, span_s)
    shares: Sequence[float] = ()
    if members.present:
        shares = _shares(live, members, sample)
        pace.follow(state, live, members.present, shares, members.foreign, sample, span_s)
    energy = _energy(state, live, members, watched, sample)
    given_j = _give_all(members, shares, sample, span_s, energy) if members.present or members.resting else 0.0
    _count(state, sample, span_s, active, energy or NO_ENERGY, given_j)


def _give_all(
    members: Members, shares: Sequence[float], sample: GpuSample, span_s: float, energy: Energy | None
) -> float:
    """How much energy was given."""
    above_j = None if energy is None else energy.spent_j - energy.idle_j
    values = _values(sample)
    given_j = 0.0
    for member, share in zip(members.present, shares, strict=True):
        given_j += _give(member.track, share, span_s, values, above_j)
    for member in members.resting:
        _give(member.track, 0.0, span_s, values, above_j)
    return given_j


def _give(
    track: Track, share: float, span_s: float, values: Sequence[tuple[str, float]], above_j: float | None
) -> float:
    """Its share of a span. How much energy that is."""
    track.used_s += span_s
    means = track.means
    for metric, value in values:
        mean = means[metric]
        mean.seconds += span_s
        mean.total += value * share * span_s
    if above_j is None:
        return 0.0
    part_j = above_j * share
    track.energy_j = (track.energy_j or 0.0) + part_j
    return part_j


def _members(state: State, holders: Sequence[Member], held: Held, sample: GpuSample) -> Members:
    if sample.processes is None:  # nobody can tell: all that run
        running = [member for member in holders if isinstance(state.tasks[member.key.task].status, Running)]
        return Members(running, [], False, not running)
    present: list[Member] = []
    resting: list[Member] = []
    others = len(held)
    for member in holders:
        listed = member.key in held
        others -= listed
        if listed and member.seen.now_mib != 0:
            present.append(member)
        elif member.seen.first_at is not None:
            resting.append(member)
    foreign = others > 0 or _foreign(sample, sample.processes)
    return Members(present, resting, foreign, not present and not foreign)


def _foreign(sample: GpuSample, processes: Sequence[ProcessUse]) -> bool:
    """A process that is no attempt's; or memory beyond what the listed processes hold, which is somebody's too."""
    beyond_mib = sample.memory_used_mib
    for use in processes:
        if use.attempt is None:
            return True
        beyond_mib = None if beyond_mib is None or use.memory_mib is None else beyond_mib - use.memory_mib
    return beyond_mib is not None and beyond_mib > HIDDEN_MIB


# What each does.


def _learn(live: Live, members: Members, at: float, active: float | None, span_s: float) -> None:
    """The activity that the sample shows corrects what was thought of those present."""
    guesses: list[Guess] = []
    if members.foreign:
        guesses.append(live.background)
    elif live.background.pressure != 0.0 or live.background.variance != NEW_VARIANCE:
        live.background = Guess()  # those that come next are others
    if active is None:
        return
    for member in members.present:
        seen = member.seen
        own = seen.own
        if seen.first_at is not None:
            age_s = at - max(seen.first_at, seen.grown_at or 0.0)
            young = NEW_VARIANCE * exp(-age_s / YOUNG_S)
            own.variance = young if young > own.variance else own.variance
        guesses.append(own)
    if guesses:
        _correct(guesses, active, span_s)


def _correct(guesses: Sequence[Guess], active: float, span_s: float) -> None:
    idle = max(SLACK, 1.0 - active)
    pressure, variance = 0.0, 0.0
    for own in guesses:
        own.variance += DRIFT * (own.pressure if own.pressure > SMALL else SMALL) ** 2 * span_s
        pressure += own.pressure
        variance += own.variance
    error = -log(idle) - pressure
    noise = (NOISE * max(active, SMALL) / idle) ** 2  # as a variance of the pressure: a full GPU tells little
    unsure = variance + noise
    for own in guesses:
        gain = own.variance / unsure
        corrected = own.pressure + gain * error
        own.pressure = corrected if corrected > 0.0 else 0.0
        own.variance *= 1.0 - gain


def weight(own: Guess) -> float:
    """The SM activity that is its own."""
    return 1.0 - exp(-max(own.pressure, DOUBT * sqrt(own.variance)))


def _shares(live: Live, members: Members, sample: GpuSample) -> list[float]:
    """Of those present, in their order; they add up to 1, or to less where foreign processes are there too."""
    if len(members.present) == 1 and not members.foreign:
        return [1.0]
    weights = _told(members, sample)
    if weights is None:
        weights = [weight(member.seen.own) for member in members.present]
        if members.foreign:
            weights.append(weight(live.background))
    total = sum(weights)
    if total <= 0.0:
        return [1.0 / len(weights) for _ in members.present]
    return [weights[place] / total for place in range(len(members.present))]


def _told(members: Members, sample: GpuSample) -> list[float] | None:
    """What the sampler says of every process on the GPU, if it says it of all of them; of those present first."""
    if not members.present or not sample.processes or sample.processes[0].sm_active is None:
        return None
    told: dict[AttemptKey | None, float] = dict.fromkeys([member.key for member in members.present], 0.0)
    for use in sample.processes:
        if use.sm_active is None or not isfinite(use.sm_active):
            return None
        whose = use.attempt if use.attempt in told else None
        told[whose] = told.get(whose, 0.0) + max(0.0, use.sm_active)
    return list(told.values())


# What it comes to.


def _values(sample: GpuSample) -> list[tuple[str, float]]:
    """The metrics that it gives."""
    return [
        (metric, value)
        for metric, value in zip(METRICS, _figures(sample), strict=True)
        if value is not None and 0.0 <= value < inf
    ]


class Energy(Record, frozen=True):
    """Of a span: what the counter went up by, how much of that the GPU would have taken with nobody on it, and whether
    that is a guess."""

    spent_j: float = 0.0
    idle_j: float = 0.0
    guessed: bool = False


NO_ENERGY = Energy()


def _energy(state: State, live: Live, members: Members, before: GpuSample, sample: GpuSample) -> Energy | None:
    """None where the counter tells nothing."""
    spent_j = _spent_j(before, sample)
    if spent_j is None:
        return None
    if members.nobody:
        return Energy(spent_j, spent_j)
    known_w = state.idle_w.get(sample.gpu, live.empty_w)
    idle_w = known_w if known_w is not None else _guessed_idle_w(live)
    if idle_w is None:  # without a figure nothing is said to be above idle
        return Energy(spent_j, spent_j, guessed=True)
    return Energy(spent_j, min(spent_j, idle_w * (sample.at - before.at)), guessed=known_w is None)


def _spent_j(before: GpuSample, sample: GpuSample) -> float | None:
    if before.energy_j is None or sample.energy_j is None:
        return None
    spent_j = sample.energy_j - before.energy_j
    return spent_j if isfinite(spent_j) and spent_j >= 0.0 else None  # less than before: the counter began anew


def measured_idle_w(state: State, gpu: GpuId) -> float | None:
    """What a GPU takes with nobody on it, as far as it was seen; None where it never was."""
    live = state.live.get(gpu)
    return state.idle_w.get(gpu, live.empty_w if live is not None else None)


def _guessed_idle_w(live: Live) -> float | None:
    lowest_w = live.lowest_w if live.lowest_w is not None else _mean_w(live)
    return None if lowest_w is None else lowest_w / 2


def _mean_w(live: Live) -> float | None:
    if not live.recent_w:
        return None
    total_w = 0.0
    for watts in live.recent_w:
        total_w += watts
    return total_w / len(live.recent_w)


def _note_power(state: State, live: Live, members: Members, before: GpuSample | None, sample: GpuSample) -> None:
    """The lowest mean power, and the lowest with nobody on the GPU: what it takes idle. `before`: where the span since
    then was watched."""
    power_w = sample.power_w
    if power_w is None and before is not None:
        spent_j = _spent_j(before, sample)
        power_w = None if spent_j is None else spent_j / (sample.at - before.at)
    if power_w is None or not isfinite(power_w) or power_w < 0.0:
        return
    recent_w = live.recent_w
    recent_w.append(power_w)
    empty = members.nobody and not state.on_gpu.get(sample.gpu)
    live.empty_for = live.empty_for + 1 if empty else 0
    if empty and sample.power_w is not None:  # a counter may lag: a single figure made from it is none
        live.empty_w = power_w if live.empty_w is None else min(live.empty_w, power_w)
    mean_w = _mean_w(live) if len(recent_w) >= POWER_SAMPLES else None
    if mean_w is None:
        return
    if live.lowest_w is None or mean_w < live.lowest_w:
        live.lowest_w = mean_w
    if live.empty_for >= POWER_SAMPLES:
        state.idle_w[sample.gpu] = min(mean_w, state.idle_w.get(sample.gpu, mean_w))


def _count(
    state: State, sample: GpuSample, span_s: float, active: float | None, energy: Energy, tasks_j: float
) -> None:
    gpu = sample.gpu
    holders = len(state.on_gpu.get(gpu, ()))
    hour = int(sample.at // HOUR_S)
    known = state.usage.get((hour, gpu)) or GpuUsage(gpu=gpu, hour=hour)
    state.usage[hour, gpu] = GpuUsage(  # added up at once: there is one for every sample
        gpu=gpu,
        hour=hour,
        watched_s=known.watched_s + span_s,
        held_s=known.held_s + (span_s if holders else 0.0),
        shared_s=known.shared_s + (span_s if holders > 1 else 0.0),
        sm_s=known.sm_s + (active or 0.0) * span_s,
        energy_j=known.energy_j + energy.spent_j,
        idle_j=known.idle_j + energy.idle_j,
        tasks_j=known.tasks_j + tasks_j,
        guessed_s=known.guessed_s + (span_s if energy.guessed else 0.0),
    )
