"""When an attempt has settled, its booking shrinks to what it was seen to take, and a margin: the rest is for others.

The limit that it was launched under stays where it was. Should it grow again, the ledger counts what it holds as long
as there is room (view.py), and where there is none the watchdog protects its neighbours. So nothing shrinks where the
watchdog is off, nor for a task that must not be run twice.

To have settled is not enough here: a task that loads its data for a minute after its weights has settled as well. It
must have worked, and its memory must not have grown since. Where nobody tells the GPU's SM activity, nothing shrinks.
"""

from __future__ import annotations

from carma.core.events import BookingShrunk
from carma.core.model import AttemptKey, GpuId
from carma.core.placement import RECOVERY
from carma.core.seen import Seen
from carma.core.state import State
from carma.core.status import Running
from carma.core.task import Task
from carma.core.window import given

MARGIN_SHARE = 0.05  # above what was seen: an evaluation now and then, fragmentation
MARGIN_MIB = 256
WORKING = 0.01  # SM activity, from which on a GPU is said to do something
KEPT = ("declared", RECOVERY)  # the user's own word; and one that memory has stopped before gets what it then asked for
HISTORY = "history"


def with_margin(mib: int) -> int:
    return mib + max(MARGIN_MIB, round(mib * MARGIN_SHARE))


def shrinks(state: State, now: float) -> list[BookingShrunk]:
    """Those that are due: one for each attempt, at most once."""
    if not (state.rules.memory.shrink and state.rules.sharing.watchdog):
        return []
    due: list[BookingShrunk] = []
    for task_id, key in state.active.items():
        task = state.tasks[task_id]
        peak_mib = _settled_at_mib(state, task, key)
        if peak_mib is None:
            continue
        booked_mib = task.attempts[-1].placement.booking.memory_mib
        enough_mib = max(with_margin(peak_mib), _known_mib(task))
        if enough_mib + state.rules.warmup.growth_mib <= booked_mib:
            due.append(BookingShrunk(now, key, booked_mib, enough_mib, peak_mib))
    return due


def _settled_at_mib(state: State, task: Task, key: AttemptKey) -> int | None:
    """Where it has settled, on all of its GPUs; None for one that has not, or whose booking is not to be touched."""
    track, status = state.tracks.get(key), task.status
    if track is None or track.peak_mib is None or not isinstance(status, Running) or status.ending is not None:
        return None
    booking = status.placement.booking
    if booking.alone or booking.placed_mib is not None or booking.source in KEPT or _only_once(state, task):
        return None
    own = track.activity.sm_active if track.activity is not None else None
    settled = all(_calm(state, gpu, seen) for gpu, seen in track.on.items())
    return track.peak_mib if settled and own is not None and own >= WORKING else None


def _calm(state: State, gpu: GpuId, seen: Seen) -> bool:
    """It has settled there and holds memory, which has not grown while the GPU worked for all of the settling time."""
    live = state.live.get(gpu)
    newest = live.window.newest if live is not None else None
    if live is None or newest is None or seen.settled_at is None or seen.first_at is None or not seen.now_mib:
        return False
    settle_s = state.rules.warmup.settle_s
    if newest.at - max(seen.first_at, seen.grown_at or seen.first_at) < settle_s:
        return False
    since = newest.at - settle_s
    active = [given(sample, "sm_active") for sample in live.window.samples if sample.at >= since]
    known = [value for value in active if value is not None]
    return bool(known) and sum(known) / len(known) >= WORKING


def _only_once(state: State, task: Task) -> bool:
    """Whether nobody would bring it back, should the watchdog have to stop it."""
    retries = state.rules.recovery.retries if task.spec.max_oom_retries is None else task.spec.max_oom_retries
    return retries == 0


def _known_mib(task: Task) -> int:
    """Earlier runs were seen to their end: what they came to is known better than by the first steps of this one."""
    estimate = task.estimate
    return with_margin(estimate.footprint_mib) if estimate is not None and estimate.source == HISTORY else 0
