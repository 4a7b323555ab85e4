"""The end of an attempt: the event with all observations of it, and the record of attempts that ended above their
booking, which may have caused an OOM of a neighbour that is reported later."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.core.model.events import AttemptEnded
from carma.core.model.outcome import Outcome, OutOfMemory
from carma.core.model.task import Attempt
from carma.core.model.values import AttemptKey, GpuId
from carma.core.state import State
from carma.core.telemetry.observation import over_booking
from carma.core.telemetry.pace import alone_of
from carma.core.telemetry.step_rates import progress_of


def ended(
    state: State, key: AttemptKey, outcome: Outcome, at: float, guilty: Sequence[AttemptKey] = ()
) -> AttemptEnded:
    """`guilty` are attempts that just ran out of their own booking, which no sample may have shown."""
    track = state.tracks.get(key)
    event = AttemptEnded(at, key, outcome)
    if track is not None:
        event = replace(
            event,
            peak_mib=track.peak_mib,
            energy_j=track.energy_j,
            activity=track.activity,
            used_s=track.used_s,
            alone=alone_of(track, at),
            progress=progress_of(track),
        )
    if not isinstance(outcome, OutOfMemory):
        return event
    if outcome.peak_mib is not None:
        event = replace(event, peak_mib=max(event.peak_mib or 0, outcome.peak_mib))
    return event if outcome.where != "gpu" else replace(event, over_booking=_over_booking(state, key, guilty))


def _over_booking(state: State, key: AttemptKey, guilty: Sequence[AttemptKey]) -> tuple[AttemptKey, ...]:
    """Neighbours above their booking: now, at their own end a moment ago, or by `guilty`."""
    found: list[AttemptKey] = []
    track = state.tracks.get(key)
    for gpu in track.on if track is not None else ():
        found += [other for other in state.on_gpu.get(gpu, {}) if over_booking(state, gpu, other)]
        found += _ended_above_booking(state, gpu, key)
    found += [other for other in guilty if _share_a_gpu(state, key, other)]
    return tuple(other for other in dict.fromkeys(found) if other != key)


def _ended_above_booking(state: State, gpu: GpuId, key: AttemptKey) -> list[AttemptKey]:
    """Recent neighbours that ended while above their booking. Earlier attempts of the task itself do not count."""
    live = state.live.get(gpu)
    since = max(state.tasks[key.task].attempts[-1].placed_at, state.now - state.rules.window.stale_s)
    ends = {} if live is None else live.ended_above_booking
    return [other for other, at in ends.items() if at >= since and other.task != key.task]


def _share_a_gpu(state: State, one: AttemptKey, other: AttemptKey) -> bool:
    return any(one in held and other in held for held in state.on_gpu.values())


def record_end(state: State, attempt: Attempt, key: AttemptKey, at: float, guilty: bool) -> None:
    """Records the end. The caller then removes the attempt from its GPUs. `guilty`: it caused its own OOM."""
    recent = at - state.rules.window.stale_s
    for gpu in attempt.placement.gpus:
        live = state.live_of(gpu)
        live.ended_above_booking = {other: then for other, then in live.ended_above_booking.items() if then >= recent}
        if guilty or (key in state.on_gpu.get(gpu, {}) and over_booking(state, gpu, key)):
            live.ended_above_booking[key] = at
        live.left_at = at
