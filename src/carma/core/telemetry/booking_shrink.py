"""Shrinks the booking of a settled attempt to its observed memory plus a margin.

Its memory limit stays. If it grows again, the ledger counts its observed memory as long as there is room (gpu_view.py);
if there is none, the watchdog protects its neighbours. So bookings do not shrink without the watchdog, nor for a task
that must not be retried.

A settled attempt can still be loading data after its weights. So it must also have computed, without memory growth
since then. Without SM activity, nothing shrinks.
"""

from __future__ import annotations

from carma.core.model.decision import RECOVERY
from carma.core.model.events import BookingShrunk
from carma.core.model.status import Running
from carma.core.model.task import Task
from carma.core.model.values import Booking, GpuId, TaskId
from carma.core.state import State, in_order
from carma.core.telemetry.measurements import AttemptOnGpu, Track
from carma.core.telemetry.window import given

MARGIN_SHARE = 0.05  # of the observed memory, for occasional evaluations and fragmentation
MARGIN_MIB = 256
WORKING = 0.01  # minimum SM activity of a GPU in use
NEVER_SHRUNK = ("declared", RECOVERY)  # figures of the user, and of recovery after an OOM
HISTORY = "history"


def with_margin(mib: int) -> int:
    return mib + max(MARGIN_MIB, round(mib * MARGIN_SHARE))


def shrinks(state: State, now: float) -> list[BookingShrunk]:
    """The bookings to shrink, each attempt at most once: peaks never fall."""
    if not (state.rules.memory.shrink and state.rules.sharing.watchdog):
        return []
    looked_at = (shrink_of(state, task_id, now) for task_id in in_order(state.settled, state.active))
    return [event for event in looked_at if event is not None]


def check(state: State, task_id: TaskId) -> None:
    """Update the index of bookings to shrink after a sample."""
    key = state.active[task_id]
    track, task = state.tracks[key], state.tasks[task_id]
    if track.shrinks and track.peak_mib is not None and isinstance(task.status, Running):
        track.shrinks = _gains(state, task, track)  # False is final: peaks do not fall
    if track.shrinks and shrink_of(state, task_id, state.now) is not None:
        state.settled.add(task_id)
    else:
        state.settled.discard(task_id)


def shrink_of(state: State, task_id: TaskId, now: float) -> BookingShrunk | None:
    """The event for an active task, or None."""
    task, key = state.tasks[task_id], state.active[task_id]
    track = state.tracks[key]
    if track.peak_mib is None or not isinstance(task.status, Running):
        return None
    if not _gains(state, task, track) or not settled_everywhere(state, track):
        return None
    booked_mib = task.attempts[-1].placement.booking.memory_mib
    return BookingShrunk(now, key, booked_mib, _enough_mib(task, track), track.peak_mib)


def _enough_mib(task: Task, track: Track) -> int:
    return max(with_margin(track.peak_mib or 0), known_mib(task))


def _gains(state: State, task: Task, track: Track) -> bool:
    """Whether the booking may shrink by a relevant amount."""
    booking = task.attempts[-1].placement.booking
    gain_mib = booking.memory_mib - _enough_mib(task, track)
    return gain_mib >= state.rules.warmup.growth_mib and _may_shrink(state, task, booking)


def _may_shrink(state: State, task: Task, booking: Booking) -> bool:
    stopping = isinstance(task.status, Running) and task.status.ending is not None
    return not stopping and not booking.alone and booking.source not in NEVER_SHRUNK and not _never_retried(state, task)


def settled_everywhere(state: State, track: Track) -> bool:
    """Whether it has settled and computed on all of its GPUs."""
    return all(_calm(state, gpu, seen) and _works(state, gpu, seen) for gpu, seen in track.on.items())


def _calm(state: State, gpu: GpuId, seen: AttemptOnGpu) -> bool:
    """Whether it has settled there and its memory has not grown since."""
    live = state.live.get(gpu)
    newest = None if live is None else live.window.newest
    if newest is None or seen.settled_at is None or seen.first_at is None or not seen.now_mib:
        return False
    return newest.at - max(seen.first_at, seen.grown_at or seen.first_at) >= state.rules.warmup.settle_s


def _works(state: State, gpu: GpuId, seen: AttemptOnGpu) -> bool:
    """Whether the GPU computed for most of the settling time, partly for this attempt."""
    live = state.live.get(gpu)
    if live is None:
        return False
    window = live.window
    since = 0.0 if window.newest is None else window.newest.at - state.rules.warmup.settle_s
    active = [given(sample, "sm_active") or 0.0 for sample in window.samples if sample.at >= since]
    working = sum(value >= WORKING for value in active)
    return 2 * working > len(active) and seen.own.pressure >= WORKING


def _never_retried(state: State, task: Task) -> bool:
    """Whether recovery would not retry it after the watchdog stopped it."""
    retries = state.rules.recovery.retries if task.spec.max_oom_retries is None else task.spec.max_oom_retries
    return retries == 0


def known_mib(task: Task) -> int:
    """Memory of earlier complete runs, which is better known than by the first steps of this one; 0 if unknown."""
    estimate = task.estimate
    return with_margin(estimate.footprint_mib) if estimate is not None and estimate.source == HISTORY else 0
