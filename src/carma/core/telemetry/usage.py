"""The use of each GPU by the hour, and the UseNoted event that stores it with the observations of running attempts.

Only observed time is counted. A span between two samples counts in the hour in which it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from carma.core.model.events import AttemptUse, UseNoted
from carma.core.model.status import Running
from carma.core.model.values import AttemptKey, GpuUsage
from carma.core.state import State
from carma.core.telemetry.measurements import Hour
from carma.core.telemetry.pace import alone_of
from carma.core.telemetry.step_rates import progress_of

HOUR_S = 3600.0


def add_up(one: GpuUsage, other: GpuUsage) -> GpuUsage:
    """The sum of two rows of the same GPU and hour."""
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in Hour.__slots__})


def not_noted(state: State) -> tuple[GpuUsage, ...]:
    """The use since the last UseNoted."""
    return tuple(
        GpuUsage(gpu=gpu, hour=hour, **{name: getattr(sums, name) for name in Hour.__slots__})
        for (hour, gpu), sums in state.usage.items()
    )


def note(state: State) -> UseNoted:
    """All observations since the last stored UseNoted. The state changes only when `step` gets the event."""
    uses = (_use(state, key) for key in state.active.values())
    return UseNoted(
        state.now,
        attempts=tuple(use for use in uses if use is not None),
        gpus=not_noted(state),
        idle_w=dict(state.idle_w),
        empty_w=state.empty_w(),
        corrections=tuple(one for name, one in state.corrections.items() if name in state.new_corrections),
    )


def _use(state: State, key: AttemptKey) -> AttemptUse | None:
    track = state.tracks.get(key)
    if track is None or not isinstance(state.tasks[key.task].status, Running):
        return None
    if track.peak_mib is None and track.used_s <= 0.0:
        return None
    return AttemptUse(
        key=key,
        peak_mib=track.peak_mib,
        energy_j=track.energy_j,
        activity=track.activity,
        used_s=track.used_s,
        alone=alone_of(track, state.now),
        progress=progress_of(track),
        settled=all(seen.settled_at is not None for seen in track.on.values()),
    )


def noted(state: State, rows: Iterable[GpuUsage]) -> None:
    """The archive has these rows now."""
    for row in rows:
        state.usage.pop((row.hour, row.gpu), None)
