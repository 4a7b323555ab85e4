"""Whose activity and whose energy? No driver tells how much of a shared GPU's SM activity each process causes, so it is
worked out from what was seen of each attempt.

An attempt that has a GPU alone has all of it. Where several hold it, shares are in proportion to weights: what an
attempt showed when it last was alone there or, for one that came to others, by how much the GPU's activity rose from
before it came until it had settled; those of whom neither is known weigh as much as the others do on average. Weights
are ratios, so a slow-down that all of them suffer cancels out; one that joins a full GPU is weighed too lightly,
because activity cannot rise above 1. Where the sampler tells the activity of every process, that is used instead.
Foreign processes have a share too, which is nobody's.

A span between two samples counts whole for those who hold memory at its end: the last part of a run is missed, and the
first is counted from the sample before, which evens out.
"""

from __future__ import annotations

from math import isfinite

from carma.core.model import Activity, AttemptKey, GpuId, GpuSample, Record
from carma.core.ports import GpuUsage
from carma.core.seen import Live, Mean, Seen, Track
from carma.core.snapshot import HIDDEN_MIB
from carma.core.state import State
from carma.core.status import Running
from carma.core.usage import HOUR_S, count
from carma.core.window import given

METRICS = Activity.__struct_fields__


class Members(Record, frozen=True):
    """Who was on a GPU when a sample was taken."""

    present: tuple[AttemptKey, ...]  # they hold memory there
    resting: tuple[AttemptKey, ...]  # they did before, and hold none now
    foreign: bool

    @property
    def nobody(self) -> bool:
        return not self.present and not self.foreign


def share_out(state: State, live: Live, before: GpuSample | None, sample: GpuSample) -> None:
    """What happened since the sample before: to each attempt its share, and to the GPU's hour the whole."""
    if before is None or before.fault is not None or sample.fault is not None:
        return
    span_s = sample.at - before.at
    if span_s > state.rules.window.stale_s:  # not watched: who was there is not known
        return
    members = _members(state, sample)
    _weigh(state, live, members, sample, span_s)
    shares = _shares(state, live, members, sample)
    spent_j, idle_j = _energy(state, live, members, before, sample)
    given_j = 0.0
    for key in (*members.present, *members.resting):
        track, share = state.tracks[key], shares.get(key, 0.0)
        _add_activity(track, sample, share, span_s)
        if spent_j is not None:
            part_j = (spent_j - idle_j) * share
            track.energy_j = (track.energy_j or 0.0) + part_j
            given_j += part_j
    _count(state, sample, span_s, spent_j or 0.0, idle_j, given_j)


def _members(state: State, sample: GpuSample) -> Members:
    holders = [key for key in state.on_gpu.get(sample.gpu, {}) if key in state.tracks]
    if sample.processes is None:  # nobody can tell: all that run
        running = (key for key in holders if isinstance(state.tasks[key.task].status, Running))
        return Members(tuple(running), (), False)
    listed = {use.attempt for use in sample.processes}
    present = tuple(key for key in holders if key in listed and _seen(state, key, sample.gpu).now_mib != 0)
    resting = tuple(key for key in holders if key not in present and _seen(state, key, sample.gpu).first_at is not None)
    return Members(present, resting, bool(listed - set(holders)) or _hidden(sample))


def _hidden(sample: GpuSample) -> bool:
    """Memory beyond what the listed processes hold is somebody's too."""
    held = [use.memory_mib for use in sample.processes or ()]
    if sample.memory_used_mib is None or None in held:
        return False
    return sample.memory_used_mib - sum(mib or 0 for mib in held) > HIDDEN_MIB


def _seen(state: State, key: AttemptKey, gpu: GpuId) -> Seen:
    return state.tracks[key].on[gpu]


# What each weighs.


def came(state: State, live: Live, key: AttemptKey, sample: GpuSample) -> None:
    """An attempt was seen on the GPU for the first time: what the GPU showed without it is what the others do."""
    others = [
        _seen(state, other, sample.gpu)
        for other in state.on_gpu.get(sample.gpu, {})
        if other != key and other in state.tracks
    ]
    first = [seen.first_at for seen in others if seen.first_at is not None and seen.now_mib != 0]
    if not first:
        return
    for seen in others:  # from now on a rise tells of the newcomer
        seen.weighed = seen.weighed or seen.after.seconds > 0
    _seen(state, key, sample.gpu).before_sm = mean_sm(live, max(live.left_at, *first), sample.at)


def mean_sm(live: Live, since: float, until: float) -> float | None:
    """The GPU's mean SM activity over the samples after `since` and before `until`."""
    found = [
        active
        for sample in live.window.samples
        if since < sample.at < until and (active := given(sample, "sm_active")) is not None
    ]
    return sum(found) / len(found) if found else None


def _weigh(state: State, live: Live, members: Members, sample: GpuSample, span_s: float) -> None:
    active = given(sample, "sm_active")
    if active is None:
        return
    if members.foreign and not members.present:
        live.background.add(active, span_s)
    only = len(members.present) == 1 and not members.foreign
    for key in members.present:
        seen = _seen(state, key, sample.gpu)
        settles_now = seen.settled_at == sample.at
        if only:
            if not seen.was_alone or settles_now:
                seen.alone = Mean()
            seen.alone.add(active, span_s)
        elif seen.before_sm is not None and not seen.weighed:
            if settles_now:
                seen.after = Mean()
                seen.weighed = True
            seen.after.add(active, span_s)
        seen.was_alone = only


def weight(seen: Seen) -> float | None:
    """The SM activity that is the attempt's own, as far as it is known."""
    if seen.alone.value is not None:
        return seen.alone.value
    if seen.before_sm is None or seen.after.value is None:
        return None
    return max(0.0, seen.after.value - seen.before_sm)


def _shares(state: State, live: Live, members: Members, sample: GpuSample) -> dict[AttemptKey, float]:
    """Of those present; they add up to 1, or to less where foreign processes are there too."""
    if len(members.present) == 1 and not members.foreign:
        return {members.present[0]: 1.0}
    weights: dict[AttemptKey | None, float | None] | None = _told(members, sample)
    if weights is None:
        weights = {key: weight(_seen(state, key, sample.gpu)) for key in members.present}
        if members.foreign:
            weights[None] = live.background.value
    known = [value for value in weights.values() if value is not None]
    middle = sum(known) / len(known) if known else 1.0
    full = {key: middle if value is None else value for key, value in weights.items()}
    total = sum(full.values())
    if total <= 0.0:
        return {key: 1.0 / len(full) for key in members.present}
    return {key: full[key] / total for key in members.present}


def _told(members: Members, sample: GpuSample) -> dict[AttemptKey | None, float | None] | None:
    """What the sampler says of every process on the GPU, if it says it of all of them."""
    told: dict[AttemptKey | None, float | None] = dict.fromkeys(members.present, 0.0)
    for use in sample.processes or ():
        if use.sm_active is None or not isfinite(use.sm_active):
            return None
        whose = use.attempt if use.attempt in told else None
        told[whose] = (told.get(whose) or 0.0) + max(0.0, use.sm_active)
    return told if members.present and sample.processes else None


# What it comes to.


def _add_activity(track: Track, sample: GpuSample, share: float, span_s: float) -> None:
    track.used_s += span_s
    for metric in METRICS:
        value: float | None = getattr(sample, metric)
        if value is not None and value >= 0.0 and isfinite(value):
            track.means[metric].add(value * share, span_s)


def _energy(
    state: State, live: Live, members: Members, before: GpuSample, sample: GpuSample
) -> tuple[float | None, float]:
    """(what the counter went up by, how much of that the GPU would have taken with nobody on it)."""
    spent_j: float | None = None
    if before.energy_j is not None and sample.energy_j is not None:
        spent_j = sample.energy_j - before.energy_j
        if not isfinite(spent_j) or spent_j < 0.0:  # the counter began anew
            spent_j = None
    span_s = sample.at - before.at
    _note_power(state, live, members, sample, None if spent_j is None else spent_j / span_s)
    if spent_j is None:
        return None, 0.0
    idle_w = state.idle_w.get(sample.gpu, live.lowest_w)
    if members.nobody or idle_w is None:  # without a figure nothing is said to be above idle
        return spent_j, spent_j
    return spent_j, min(spent_j, idle_w * span_s)


def _note_power(state: State, live: Live, members: Members, sample: GpuSample, by_counter_w: float | None) -> None:
    """The lowest mean power, and the lowest with nobody on the GPU: what it takes idle."""
    power_w = sample.power_w if sample.power_w is not None else by_counter_w
    if power_w is None or not isfinite(power_w) or power_w < 0.0:
        return
    empty = members.nobody and not state.on_gpu.get(sample.gpu)
    live.recent_w.append((power_w, empty))
    if len(live.recent_w) < (live.recent_w.maxlen or 1):
        return
    mean_w = sum(watts for watts, _ in live.recent_w) / len(live.recent_w)
    live.lowest_w = mean_w if live.lowest_w is None else min(live.lowest_w, mean_w)
    if all(alone for _, alone in live.recent_w):
        state.idle_w[sample.gpu] = min(mean_w, state.idle_w.get(sample.gpu, mean_w))


def _count(state: State, sample: GpuSample, span_s: float, spent_j: float, idle_j: float, tasks_j: float) -> None:
    holders = len(state.on_gpu.get(sample.gpu, {}))
    row = GpuUsage(
        gpu=sample.gpu,
        hour=int(sample.at // HOUR_S),
        watched_s=span_s,
        held_s=span_s if holders else 0.0,
        shared_s=span_s if holders > 1 else 0.0,
        sm_s=(given(sample, "sm_active") or 0.0) * span_s,
        energy_j=spent_j,
        idle_j=idle_j,
        tasks_j=tasks_j,
    )
    count(state, (row,))
