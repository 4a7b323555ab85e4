"""The watchdog stops a task above its booking before it takes memory that its neighbours booked.

A limit of MPS or of the framework fails one allocation, which the program can even handle. The watchdog can only end
the task, so it acts only when a booking is in danger. As long as there is room, a task may exceed its booking, and the
ledger counts its observed memory.
"""

from __future__ import annotations

from carma.core.model.events import StopRequested
from carma.core.model.outcome import OutOfMemory
from carma.core.model.status import Running, Starting
from carma.core.model.units import show_mib
from carma.core.model.values import AttemptKey, Gpu, GpuId, Record, TaskId
from carma.core.scheduling.snapshot import left_mib
from carma.core.state import State, in_order
from carma.core.telemetry.observation import over_booking

# No grace period: a growing task can allocate gigabytes per second.
GRACE_S = 0.0
KILL = 9


class _Held(Record, frozen=True):
    """One attempt on one GPU, now."""

    key: AttemptKey
    booking_mib: int
    now_mib: int
    stopping: bool

    @property
    def excess_mib(self) -> int:
        return self.now_mib - self.booking_mib

    @property
    def growth_mib(self) -> int:
        """The part of its booking that it does not use yet."""
        return 0 if self.stopping else max(0, -self.excess_mib)


def stops(state: State, now: float) -> list[StopRequested]:
    """The tasks to stop now, each once, by GPU the one with the largest excess first."""
    if not state.rules.sharing.watchdog:
        return []
    found: dict[TaskId, StopRequested] = {}
    for gpu_id in in_order(state.over_booking, state.on_gpu):
        for event in stops_on(state, gpu_id, now):
            found.setdefault(event.task, event)
    return list(found.values())


def stops_on(state: State, gpu_id: GpuId, now: float) -> list[StopRequested]:
    gpu, holders = state.gpus.get(gpu_id), state.on_gpu[gpu_id]
    if gpu is not None and len(holders) > 1 and any(over_booking(state, gpu_id, key) for key in holders):
        return _on(state, gpu, now)
    return []


def _on(state: State, gpu: Gpu, now: float) -> list[StopRequested]:
    used_mib = _used_mib(state, gpu.id, now)
    if used_mib is None:
        return []
    held = [_held(state, gpu.id, key) for key in state.on_gpu[gpu.id]]
    # The ledger leaves the margin free at a placement. The watchdog acts at half of the margin; otherwise a few MiB
    # more would end a task above its booking right after a neighbour started.
    promised_mib = sum(one.growth_mib for one in held)
    wanted_mib = promised_mib + state.rules.memory.margin_mib // 2
    free_mib = gpu.memory_mib - used_mib + sum(one.now_mib for one in held if one.stopping)
    due: list[StopRequested] = []
    over = [one for one in held if one.excess_mib > state.rules.warmup.growth_mib and not one.stopping]
    for one in sorted(over, key=lambda one: (-one.excess_mib, one.key)):
        if free_mib >= wanted_mib:
            break
        due.append(_stop(one, gpu, free_mib, promised_mib, now))
        free_mib += one.now_mib
    return due


def _used_mib(state: State, gpu: GpuId, now: float) -> int | None:
    """Memory in use by the newest sample, without attempts that ended since; None if unknown or too old."""
    live = state.live.get(gpu)
    sample = live.newest_memory if live is not None else None
    if sample is None or sample.memory_used_mib is None or sample.processes is None:
        return None
    if sample.at < now - state.rules.window.stale_s:
        return None
    return sample.memory_used_mib - left_mib(state, sample)


def _held(state: State, gpu: GpuId, key: AttemptKey) -> _Held:
    status = state.tasks[key.task].status
    booking_mib = state.on_gpu[gpu][key].booking.memory_mib
    track = state.tracks.get(key)
    seen = track.on.get(gpu) if track is not None else None
    stopping = isinstance(status, Starting | Running) and status.ending is not None
    if seen is None or (seen.now_mib is None and seen.first_at is None):
        return _Held(key, booking_mib, 0, stopping)  # not observed yet: it can still take its whole booking
    return _Held(key, booking_mib, booking_mib if seen.now_mib is None else seen.now_mib, stopping)


def _stop(one: _Held, gpu: Gpu, free_mib: int, promised_mib: int, now: float) -> StopRequested:
    message = (
        f"stopped by the watchdog: it held {show_mib(one.now_mib)} on GPU {gpu.index} and had booked "
        f"{show_mib(one.booking_mib)}; {show_mib(max(0, free_mib))} were left, and its neighbours may still take "
        f"{show_mib(promised_mib)} of what they booked"
    )
    ending = OutOfMemory("gpu", 128 + KILL, None, one.now_mib, message)
    return StopRequested(now, one.key.task, ending, GRACE_S, KILL)
