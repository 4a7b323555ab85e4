"""What samples tell: memory peaks, energy, and when a newcomer has settled. Called by `machine.step` alone.

An attempt settles on a GPU when, counted from the first time it held memory there, its memory has not grown for
`settle_s` and the GPU's SM activity is about the same in both halves of that span (published: 30 s from first activity
predict the rest of a run to .0055; a fixed wait from launch does not, because start-up takes 8 to 55 s).
"""

from __future__ import annotations

from carma.core.model import AttemptKey, GpuId, GpuSample
from carma.core.state import Live, Seen, State, Track
from carma.core.status import Running


def take(state: State, sample: GpuSample) -> None:
    """One sample of one GPU."""
    if sample.gpu not in state.gpus:
        return
    live = state.live_of(sample.gpu)
    before = live.window.newest
    live.window.add(sample)
    keys = state.on_gpu.get(sample.gpu, {})
    held = memory_by_attempt(sample)
    for key in keys:
        track = state.tracks.get(key)
        if track is not None:
            _notice(state, track, live, sample, held.get(key) if held is not None else None)
    _share_energy(state, before, sample)


def memory_by_attempt(sample: GpuSample) -> dict[AttemptKey, int] | None:
    """MiB of each attempt on that GPU; None when the driver gives no process list."""
    if sample.processes is None:
        return None
    held: dict[AttemptKey, int] = {}
    for use in sample.processes:
        if use.attempt is not None:
            held[use.attempt] = held.get(use.attempt, 0) + (use.memory_mib or 0)
    return held


def _notice(state: State, track: Track, live: Live, sample: GpuSample, memory_mib: int | None) -> None:
    seen = track.on.get(sample.gpu)
    if seen is None or memory_mib is None:
        return
    seen.now_mib = memory_mib
    track.peak_mib = max(track.peak_mib or 0, memory_mib)
    if seen.first_at is None:
        seen.first_at = sample.at
        seen.level_mib = memory_mib
        live.since = sample.at - 1e-9  # this sample is the first that tells of the newcomer
    elif memory_mib > seen.level_mib + state.rules.warmup.growth_mib:
        seen.level_mib = memory_mib
        seen.grown_at = sample.at
    if seen.settled_at is None and _settled(state, seen, live, sample):
        seen.settled_at = sample.at


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
        if sample.at >= since and sample.sm_active is not None:
            (early if sample.at < middle else late).append(sample.sm_active)
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
