"""Attribution: the share of a GPU's activity and energy that each attempt causes.

No driver reports the SM activity of each process on a shared GPU, so it is estimated.

1. An attempt that has a GPU alone gets all of it.
2. On a shared GPU the shares are proportional to the estimated SM activity of each attempt by itself. Each sample
   corrects these estimates (a Kalman filter without correlations).
3. Activities do not add up: tasks slow each other down, and no GPU is more than full. But the idle parts of independent
   tasks multiply, so the filter adds up the pressure -ln(1 - activity).
4. The error of a sample is distributed by uncertainty: an attempt alone takes all of it, a new attempt takes most, and
   when an attempt leaves, the rest corrects the others. Attempts that start in the same second cannot be told apart
   until one of them leaves or begins to use memory. A full GPU tells little. A slowdown of all nearly cancels out.
5. If the sampler reports the activity of every process, that is used instead.
6. Foreign processes have a share too, which is attributed to no task.

A span between two samples counts for the attempts that hold memory at its end: the last part of a run is missed, and
the first part is counted from the sample before it, which evens out.

Only energy above idle is distributed. Idle power is the lowest mean of five consecutive samples without processes;
until there are five, the lowest single reading. If the GPU was never observed empty, it is half of the lowest power:
with all of it, a task with constant power would get nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from operator import attrgetter

from carma.core.model.status import Running
from carma.core.model.values import ACTIVITY_METRICS, AttemptKey, GpuId, GpuSample, ProcessUse
from carma.core.state import State
from carma.core.telemetry import pace
from carma.core.telemetry.measurements import (
    HIDDEN_MIB,
    NEW_VARIANCE,
    POWER_SAMPLES,
    Hour,
    Live,
    Member,
    Members,
    PressureEstimate,
)
from carma.core.telemetry.usage import HOUR_S
from carma.core.telemetry.window import given

_figures = attrgetter(*ACTIVITY_METRICS)

NOISE = 0.05  # relative error of a reading: training steps and samples are not synchronised
SLACK = 0.02  # minimum idle part: the pressure of a full GPU is infinite
YOUNG_S = 20.0  # time constant of the initial uncertainty, from first use or last growth: start-ups take 8 to 55 s
DRIFT = 0.01  # variance per second, relative to the squared pressure: phases and neighbours change the activity
SMALL = 0.1  # minimum for noise and drift, so that the estimate of an idle attempt can rise
MINIMUM_WEIGHT_DEVIATIONS = 0.2  # minimum weight in standard deviations: a poorly known attempt never gets share 0


Held = Mapping[AttemptKey, int | None]  # MiB of each attempt in a sample


def share_out(state: State, live: Live, members: Members, before: GpuSample | None, sample: GpuSample) -> None:
    """Distribute the span since the previous sample: shares to the attempts, all of it to the GPU's hour."""
    # After a gap it is unknown which attempts were there, so that the span is not counted.
    gap = before is None or before.fault is not None or sample.at - before.at > state.rules.window.stale_s
    observed = None if gap else before
    _note_power(state, live, members, observed, sample)
    if observed is None:
        return
    span_s, active = sample.at - observed.at, given(sample, "sm_active")
    _learn(live, members, sample.at, active, span_s)
    shares: Sequence[float] = ()
    if members.present:
        shares = members.shares or _shares(live, members)
        pace.follow(state, live, members.present, shares, members.foreign, sample, span_s)
    energy = _energy(state, live, members, observed, sample)
    tasks_j = _distribute(members, shares, sample, span_s, energy) if members.present or members.resting else 0.0
    _count(state, sample, span_s, active, energy or NO_ENERGY, tasks_j)


def _distribute(
    members: Members, shares: Sequence[float], sample: GpuSample, span_s: float, energy: Energy | None
) -> float:
    """Add the shares of a span to the attempts; returns the energy that they got."""
    above_j = None if energy is None else energy[0] - energy[1]
    values = [
        (place, value)
        for place, value in enumerate(_figures(sample.activity))
        if value is not None and 0.0 <= value < inf
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
    """The attempts on the GPU when the sample was taken, by their memory."""
    if sample.processes is None:  # unknown: all running attempts
        running = [
            member
            for member in holders
            if isinstance(state.tasks[member.key.task].status, Running) and member.track.pause_began_at is None
        ]
        members = Members(running, [], foreign=False)
        members.shares = _known_shares(members, sample)
        return members
    present: list[Member] = []
    resting: list[Member] = []
    others = len(held)
    for member in holders:
        listed = member.key in held
        others -= listed
        if member.track.pause_began_at is not None:
            continue  # neither activity nor time counts for it
        if listed and member.seen.now_mib != 0:
            present.append(member)
        elif member.seen.first_at is not None:
            resting.append(member)
    members = Members(present, resting, foreign=others > 0 or _foreign(sample, sample.processes))
    members.shares = _known_shares(members, sample)
    return members


def _foreign(sample: GpuSample, processes: Sequence[ProcessUse]) -> bool:
    """Whether there is a process of no attempt, or memory beyond that of the listed processes."""
    beyond_mib = sample.memory_used_mib
    for use in processes:
        if use.attempt is None:
            return True
        beyond_mib = None if beyond_mib is None or use.memory_mib is None else beyond_mib - use.memory_mib
    return beyond_mib is not None and beyond_mib > HIDDEN_MIB


# -- activity of each attempt -----------------------------------------------------------------------------------------


def _learn(live: Live, members: Members, at: float, active: float | None, span_s: float) -> None:
    """Correct the estimates of the present attempts by the activity of the sample."""
    if members.foreign:
        guesses = [live.background]
    else:
        guesses = []
        if live.background.pressure != 0.0 or live.background.variance != NEW_VARIANCE:
            live.background = PressureEstimate()  # the next foreign processes are different ones
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


def _correct(guesses: Sequence[PressureEstimate], active: float, span_s: float) -> None:
    idle = max(SLACK, 1.0 - active)
    pressure, variance = 0.0, 0.0
    for own in guesses:
        known = own.pressure
        own.variance += DRIFT * (known if known > SMALL else SMALL) ** 2 * span_s
        pressure += known
        variance += own.variance
    error = -log(idle) - pressure
    noise = (NOISE * max(active, SMALL) / idle) ** 2  # variance of the pressure, large on a full GPU
    unsure = variance + noise
    for own in guesses:
        gain = own.variance / unsure
        corrected = own.pressure + gain * error
        own.pressure = corrected if corrected > 0.0 else 0.0
        own.variance *= 1.0 - gain


def weight(own: PressureEstimate) -> float:
    """Estimated SM activity of one attempt."""
    return 1.0 - exp(-max(own.pressure, MINIMUM_WEIGHT_DEVIATIONS * sqrt(own.variance)))


def sm_by_attempt(live: Live) -> dict[AttemptKey, float]:
    """SM activity of each attempt that holds memory on the GPU, in its newest sample; empty if it is not known."""
    members, newest = live.newest_members, live.window.newest
    active = given(newest, "sm_active") if newest is not None else None
    if members is None or active is None or not members.present:
        return {}
    shares = members.shares or _shares(live, members)
    return {member.key: active * share for member, share in zip(members.present, shares, strict=True)}


def _shares(live: Live, members: Members) -> list[float]:
    """Shares of the present attempts, in order, by estimated activity."""
    weights = [weight(member.seen.own) for member in members.present]
    if members.foreign:
        weights.append(weight(live.background))
    return _parts(weights, len(members.present))


def _parts(weights: Sequence[float], present: int) -> list[float]:
    """Normalised weights of the first `present` entries; the weight of foreign processes comes last."""
    total = sum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * present
    return [weights[place] / total for place in range(present)]


def _known_shares(members: Members, sample: GpuSample) -> list[float] | None:
    """Shares of the present attempts where they are known: of an attempt alone, and of all if the sampler reports the
    activity of every process."""
    present = members.present
    if len(present) == 1 and not members.foreign:
        return [1.0]
    if not present or not sample.processes or sample.processes[0].sm_active is None:
        return None
    reported: dict[AttemptKey | None, float] = dict.fromkeys([member.key for member in present], 0.0)
    for use in sample.processes:
        if use.sm_active is None or not isfinite(use.sm_active):
            return None
        attempt = use.attempt if use.attempt in reported else None
        reported[attempt] = reported.get(attempt, 0.0) + max(0.0, use.sm_active)
    return _parts(list(reported.values()), len(present))


# -- energy -----------------------------------------------------------------------------------------------------------


# Of a span: energy in J, the idle part of it in J, and whether the idle part is assumed.
Energy = tuple[float, float, bool]
NO_ENERGY: Energy = (0.0, 0.0, False)


def _energy(state: State, live: Live, members: Members, before: GpuSample, sample: GpuSample) -> Energy | None:
    """None without an energy counter."""
    spent_j = _spent_j(before, sample)
    if spent_j is None:
        return None
    if members.empty:
        return spent_j, spent_j, False
    known_w = state.idle_w.get(sample.gpu, live.empty_w)
    idle_w = known_w if known_w is not None else _assumed_idle_w(live)
    if idle_w is None:  # unknown idle power: no energy counts as above idle
        return spent_j, spent_j, True
    return spent_j, min(spent_j, idle_w * (sample.at - before.at)), known_w is None


def _spent_j(before: GpuSample, sample: GpuSample) -> float | None:
    if before.energy_j is None or sample.energy_j is None:
        return None
    spent_j = sample.energy_j - before.energy_j
    return spent_j if isfinite(spent_j) and spent_j >= 0.0 else None  # it fell: the counter was reset


def measured_idle_w(state: State, gpu: GpuId) -> float | None:
    """Measured idle power of a GPU; None if it was never observed empty."""
    live = state.live.get(gpu)
    return state.idle_w.get(gpu, live.empty_w if live is not None else None)


def idle_w_of(state: State, live: Live, gpu: GpuId) -> float | None:
    """Measured or assumed idle power; None before the first reading."""
    known_w = state.idle_w.get(gpu, live.empty_w)
    return _assumed_idle_w(live) if known_w is None else known_w


def _assumed_idle_w(live: Live) -> float | None:
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
    """Update the lowest mean power and the idle power. `before` is the previous sample, if the span was observed."""
    power_w = sample.power_w
    if power_w is None and before is not None:
        spent_j = _spent_j(before, sample)
        power_w = None if spent_j is None else spent_j / (sample.at - before.at)
    if power_w is None or not isfinite(power_w) or power_w < 0.0:
        return
    recent_w = live.recent_w
    recent_w.append(power_w)
    empty = members.empty and not state.on_gpu.get(sample.gpu)
    live.empty_for = live.empty_for + 1 if empty else 0
    if empty and sample.power_w is not None:  # a single figure from a counter that lags is not reliable
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
