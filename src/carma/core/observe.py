"""What samples tell: memory peaks, energy, and when a newcomer has settled. Called by `machine.step` alone.

An attempt settles on a GPU when, counted from the first time it held memory there, its memory has not grown for
`settle_s` and the GPU's SM activity is about the same in both halves of that span (published: 30 s from first activity
predict the rest of a run to .0055; a fixed wait from launch does not, because start-up takes 8 to 55 s).
"""

from __future__ import annotations

from carma.core.model import AttemptKey, GpuId, GpuSample
from carma.core.state import Live, Seen, State, Track
from carma.core.status import Running
from carma.core.window import given


def take(state: State, sample: GpuSample) -> None:
    """One sample of one GPU. One that is not newer than the last tells nothing."""
    if sample.gpu not in state.gpus:
        return
    live = state.live_of(sample.gpu)
    before = live.window.newest
    if before is not None and sample.at <= before.at:
        return
    live.window.add(sample)
    held = memory_by_attempt(sample)
    for key in state.on_gpu.get(sample.gpu, {}):
        track = state.tracks.get(key)
        seen = track.on.get(sample.gpu) if track is not None else None
        if track is None or seen is None:
            continue
        memory_mib = None if sample.processes is None else held.get(key, 0)
        if seen.first_at is None and key in held and memory_mib != 0:
            seen.first_at = sample.at
            live.since = before.at if before is not None else 0.0  # this sample is the first that tells of it
        _notice(state, track, seen, sample.at, memory_mib)
        if seen.first_at is not None and seen.settled_at is None and _settled(state, seen, live, sample):
            seen.settled_at = sample.at
    _share_energy(state, before, sample)


def memory_by_attempt(sample: GpuSample) -> dict[AttemptKey, int | None]:
    """MiB of each attempt on that GPU; None where the driver does not tell how much one of its processes has."""
    held: dict[AttemptKey, int | None] = {}
    for use in sample.processes or ():
        if use.attempt is not None:
            before = held.get(use.attempt, 0)
            held[use.attempt] = None if before is None or use.memory_mib is None else before + use.memory_mib
    return held


def _notice(state: State, track: Track, seen: Seen, at: float, memory_mib: int | None) -> None:
    seen.now_mib = memory_mib
    if not memory_mib:
        return
    track.peak_mib = max(track.peak_mib or 0, memory_mib)
    if seen.first_at == at:
        seen.level_mib = memory_mib
    elif memory_mib > seen.level_mib + state.rules.warmup.growth_mib:
        seen.level_mib = memory_mib
        seen.grown_at = at


def _settled(state: State, seen: Seen, live: Live, sample: GpuSample) -> bool:
    assert seen.first_at is not None
    rules = state.rules.warmup
    calm_since = max(seen.first_at, seen.grown_at or seen.first_at)
    if sample.at - calm_since < rules.settle_s:
        return False
    return _steady(live, calm_since, sample.at, rules.activity_change)


def _steady(live: Live, since: float, until: float, change: float) -> bool:
    """SM activity of both halves of the span alike; where the GPU does not give it, the gate judges, not this."""
    middle = (since + until) / 2
    early: list[float] = []
    late: list[float] = []
    for sample in live.window.samples:
        active = given(sample, "sm_active")
        if sample.at >= since and active is not None:
            (early if sample.at < middle else late).append(active)
    if not early or not late:
        return True
    return abs(sum(early) / len(early) - sum(late) / len(late)) <= change


def _share_energy(state: State, before: GpuSample | None, sample: GpuSample) -> None:
    """The counter's step since the last sample, in equal parts to the attempts that hold the GPU."""
    if before is None or before.energy_j is None or sample.energy_j is None:
        return
    spent = sample.energy_j - before.energy_j
    tracks = [state.tracks[key] for key in state.on_gpu.get(sample.gpu, {}) if key in state.tracks]
    if spent <= 0 or not tracks:
        return
    for track in tracks:
        track.energy_j = (track.energy_j or 0.0) + spent / len(tracks)


def ending_facts(state: State, key: AttemptKey) -> tuple[int | None, float | None, tuple[AttemptKey, ...]]:
    """(peak, energy, neighbours above their booking) of an attempt that has just ended, for its AttemptEnded."""
    track = state.tracks.get(key)
    if track is None:
        return None, None, ()
    over: list[AttemptKey] = []
    for gpu in track.on:
        over.extend(other for other in state.on_gpu.get(gpu, {}) if other != key and _over_booking(state, gpu, other))
    return track.peak_mib, track.energy_j, tuple(dict.fromkeys(over))


def _over_booking(state: State, gpu: GpuId, key: AttemptKey) -> bool:
    track = state.tracks.get(key)
    seen = track.on.get(gpu) if track is not None else None
    held = seen.now_mib if seen is not None else None
    return held is not None and held > state.on_gpu[gpu][key].booking.memory_mib


def peaks_to_store(state: State) -> list[tuple[AttemptKey, int]]:
    """Attempts whose peak moved enough since it was last stored: 64 MiB or 5 %."""
    found: list[tuple[AttemptKey, int]] = []
    for task_id, key in state.active.items():
        track = state.tracks.get(key)
        task = state.tasks[task_id]
        if track is None or track.peak_mib is None or not isinstance(task.status, Running):
            continue
        known = task.attempts[-1].observed_mib
        if known is None or track.peak_mib > known + max(64, known // 20):
            found.append((key, track.peak_mib))
    return found
