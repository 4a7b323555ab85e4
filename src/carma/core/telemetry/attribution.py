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

from collections.abc import Collection, Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from operator import attrgetter

from carma.core.model.status import Running
from carma.core.model.values import ACTIVITY_METRICS, AttemptKey, GpuId, GpuSample, ProcessUse
from carma.core.scheduling.snapshot import HIDDEN_MIB
from carma.core.state import State
from carma.core.telemetry import pace
from carma.core.telemetry.measurements import NEW_VARIANCE, POWER_SAMPLES, Guess, Hour, Live, Members
from carma.core.telemetry.measurements import Member as Member
from carma.core.telemetry.usage import HOUR_S
from carma.core.telemetry.window import given

_figures = attrgetter(*ACTIVITY_METRICS)

NOISE = 0.05  # the error of a reading, as a part of it: steps and samples do not keep time with each other
SLACK = 0.02  # no GPU is taken to be fuller than all but this: the pressure of a full one would have no end
YOUNG_S = 20.0  # how fast one is no longer new, from its first use or last growth: start-ups take 8 to 55 s
DRIFT = 0.01  # variance for each second, as a part of the pressure squared: phases and neighbours change what one does
SMALL = 0.1  # the least that noise and drift are counted of, so that one thought to do nothing can be seen to wake up
DOUBT = 0.2  # nobody weighs less than this part of the guess's spread: no nothing for one of whom little is known


Held = Mapping[AttemptKey, int | None]  # MiB of each attempt that a sample shows


def share_out(state: State, live: Live, members: Members, before: GpuSample | None, sample: GpuSample) -> None:
    """What happened since the sample before: to each of its holders its share, and to the GPU's hour the whole."""
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
        shares = members.shares or _shares(live, members)
        pace.follow(state, live, members.present, shares, members.foreign, sample, span_s)
    energy = _energy(state, live, members, watched, sample)
    given_j = _give_all(members, shares, sample, span_s, energy) if members.present or members.resting else 0.0
    _count(state, sample, span_s, active, energy or NO_ENERGY, given_j)


def _give_all(
    members: Members, shares: Sequence[float], sample: GpuSample, span_s: float, energy: Energy | None
) -> float:
    """Their shares of a span. How much energy was given."""
    above_j = None if energy is None else energy[0] - energy[1]
    values = [
        (place, value)
        for place, value in enumerate(_figures(sample.activity))
        if value is not None and 0.0 <= value < inf  # the metrics that it gives
    ]
    given_j = 0.0
    for member, share in zip(members.present, shares, strict=True):
        track = member.track
        track.used_s += span_s
        seconds, totals = track.seconds, track.totals
        for place, value in values:
            seconds[place] += span_s
            totals[place] += value * share * span_s
        if above_j is not None:
            part_j = above_j * share
            track.energy_j = (track.energy_j or 0.0) + part_j
            given_j += part_j
    for member in members.resting:
        track = member.track
        track.used_s += span_s
        for place, _ in values:
            track.seconds[place] += span_s
        if above_j is not None:
            track.energy_j = track.energy_j or 0.0
    return given_j


def members_of(state: State, holders: Sequence[Member], held: Held, sample: GpuSample) -> Members:
    """Who was on the GPU when the sample was taken, by what is known of their memory now."""
    if sample.processes is None:  # nobody can tell: all that run
        running = [member for member in holders if isinstance(state.tasks[member.key.task].status, Running)]
        members = Members(running, [], foreign=False)
        members.shares = _told(members, sample)
        return members
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
    members = Members(present, resting, foreign=others > 0 or _foreign(sample, sample.processes))
    members.shares = _told(members, sample)
    return members


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
    if members.foreign:
        guesses = [live.background]
    else:
        guesses = []
        if live.background.pressure != 0.0 or live.background.variance != NEW_VARIANCE:
            live.background = Guess()  # those that come next are others
    if active is None:
        return
    for member in members.present:
        seen = member.seen
        own = seen.own
        if seen.first_at is not None:
            grown_at = seen.grown_at or 0.0
            age_s = at - (seen.first_at if seen.first_at >= grown_at else grown_at)
            young = NEW_VARIANCE * exp(-age_s / YOUNG_S)
            own.variance = young if young > own.variance else own.variance
        guesses.append(own)
    if guesses:
        _correct(guesses, active, span_s)


def _correct(guesses: Sequence[Guess], active: float, span_s: float) -> None:
    idle = max(SLACK, 1.0 - active)
    pressure, variance = 0.0, 0.0
    for own in guesses:
        known = own.pressure
        own.variance += DRIFT * (known if known > SMALL else SMALL) ** 2 * span_s
        pressure += known
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


def _shares(live: Live, members: Members) -> list[float]:
    """Of those present, in their order, by what each is thought to do."""
    weights = [weight(member.seen.own) for member in members.present]
    if members.foreign:
        weights.append(weight(live.background))
    return _parts(weights, len(members.present))


def _parts(weights: Sequence[float], present: int) -> list[float]:
    """They add up to 1, or to less where foreign processes are there too: their weights come last."""
    total = sum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * present
    return [weights[place] / total for place in range(present)]


def _told(members: Members, sample: GpuSample) -> list[float] | None:
    """Of those present, where nothing has to be guessed: one that is alone has all of it, and of others the sampler may
    tell what each process does, if it does so of all on the GPU."""
    present = members.present
    if len(present) == 1 and not members.foreign:
        return [1.0]
    if not present or not sample.processes or sample.processes[0].sm_active is None:
        return None
    told: dict[AttemptKey | None, float] = dict.fromkeys([member.key for member in present], 0.0)
    for use in sample.processes:
        if use.sm_active is None or not isfinite(use.sm_active):
            return None
        whose = use.attempt if use.attempt in told else None
        told[whose] = told.get(whose, 0.0) + max(0.0, use.sm_active)
    return _parts(list(told.values()), len(present))


# What it comes to.


# Of a span: what the counter went up by, how much of that the GPU would have taken with nobody on it, and whether that
# is a guess.
Energy = tuple[float, float, bool]
NO_ENERGY: Energy = (0.0, 0.0, False)


def _energy(state: State, live: Live, members: Members, before: GpuSample, sample: GpuSample) -> Energy | None:
    """None where the counter tells nothing."""
    spent_j = _spent_j(before, sample)
    if spent_j is None:
        return None
    if members.nobody:
        return spent_j, spent_j, False
    known_w = state.idle_w.get(sample.gpu, live.empty_w)
    idle_w = known_w if known_w is not None else _guessed_idle_w(live)
    if idle_w is None:  # without a figure nothing is said to be above idle
        return spent_j, spent_j, True
    return spent_j, min(spent_j, idle_w * (sample.at - before.at)), known_w is None


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
    lowest_w = live.lowest_w if live.lowest_w is not None else _mean_w(live.recent_w)
    return None if lowest_w is None else lowest_w / 2


def _mean_w(recent_w: Collection[float]) -> float | None:
    if not recent_w:
        return None
    total_w = 0.0
    for watts in recent_w:
        total_w += watts
    return total_w / len(recent_w)


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
    mean_w = _mean_w(recent_w) if len(recent_w) >= POWER_SAMPLES else None
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
    place = (int(sample.at // HOUR_S), gpu)
    sums = state.usage.get(place)
    if sums is None:
        sums = state.usage[place] = Hour()
    spent_j, idle_j, guessed = energy
    sums.watched_s += span_s
    if holders:
        sums.held_s += span_s
        if holders > 1:
            sums.shared_s += span_s
    sums.sm_s += (active or 0.0) * span_s
    sums.energy_j += spent_j
    sums.idle_j += idle_j
    sums.tasks_j += tasks_j
    if guessed:
        sums.guessed_s += span_s
