"""What is due, found by looking at everything anew: every task, every GPU, the whole walk. `propose` looks only where
something has changed, and must find the same at any time. Nothing here may use what `propose` keeps for itself.
"""

from __future__ import annotations

from carma.core.checkpoint_request import LATE_S
from carma.core.model.events import (
    BookingShrunk,
    Durable,
    MemoryObserved,
    PreemptionMissed,
    RecoveryDue,
    RecoveryPlanned,
    StopRequested,
    TaskFinished,
    TaskPlaced,
    TaskWarned,
)
from carma.core.model.outcome import Cancelled, NeverFits
from carma.core.model.status import Ended, Finished, Pending, Recovering, Running
from carma.core.model.values import AttemptKey
from carma.core.preemption import asks
from carma.core.propose import broken, limit_reached
from carma.core.recovery import GiveUp, next_step
from carma.core.scheduling.feasibility import by_size, never_fits
from carma.core.scheduling.placement import conclude, placement_of
from carma.core.scheduling.queue_order import KEPT_VERDICTS, PLACED_AT_ONCE
from carma.core.scheduling.scheduling_pass import Pass, turns
from carma.core.state import State
from carma.core.telemetry.booking_shrink import KEPT, known_mib, settled_everywhere, with_margin
from carma.core.telemetry.watchdog import stops_on


def propose_plainly(state: State, now: float) -> list[Durable]:
    due: list[Durable] = []
    due.extend(_stops(state, now))
    due.extend(_ends_and_recoveries(state, now))
    stopped = {event.task for event in due if isinstance(event, StopRequested)}
    due.extend(event for event in _limits(state, now) if event.task not in stopped)
    due.extend(_stayed(state, now))
    due.extend(_impossible(state, now))
    due.extend(_to_store(state, now))
    due.extend(_shrinks(state, now))
    return due or list(schedule_plainly(state, now)) or list(asks(state, now))


def _stayed(state: State, now: float) -> list[PreemptionMissed]:
    due: list[PreemptionMissed] = []
    for task in sorted(state.tasks.values(), key=lambda task: task.id):
        if not isinstance(task.status, Running) or task.status.preempting is None or task.status.ending is not None:
            continue
        if now > task.status.preempting.until + LATE_S:
            due.append(PreemptionMissed(now, task.id))
    return due


def _stops(state: State, now: float) -> list[StopRequested]:
    found: dict[int, StopRequested] = {}
    for gpu in state.on_gpu if state.rules.sharing.watchdog else ():
        for event in stops_on(state, gpu, now):
            found.setdefault(event.task, event)
    return list(found.values())


def _ends_and_recoveries(state: State, now: float) -> list[Durable]:
    due: list[Durable] = []
    for task in sorted(state.tasks.values(), key=lambda task: task.id):
        if not isinstance(task.status, Ended | Recovering):
            continue
        if isinstance(task.status, Recovering):
            due.extend([RecoveryDue(now, task.id)] if task.status.until <= now else [])
            continue
        answer = next_step(task, state.rules, by_size(state))
        if isinstance(answer, GiveUp):
            due.append(TaskFinished(now, task.id, answer.outcome))
        else:
            due.append(RecoveryPlanned(now, task.id, answer.plan, now + answer.wait_s))
    return due


def _limits(state: State, now: float) -> list[StopRequested | TaskWarned]:
    events = (limit_reached(state, state.tasks[task_id], now) for task_id in state.active)
    return [event for event in events if event is not None]


def _impossible(state: State, now: float) -> list[TaskFinished]:
    due: list[TaskFinished] = []
    for task_id, dependents in state.waiting_for.items():
        other = state.tasks.get(task_id)
        if other is None or not isinstance(other.status, Finished):
            continue
        for waiting_id in sorted(dependents):
            reason = broken(state.tasks[waiting_id], other, other.status.outcome)
            if reason is not None:
                due.append(TaskFinished(now, waiting_id, Cancelled("carma", reason)))
    if not state.gpus or state.rules.queue.misfits != "end":
        return due
    for task_id in sorted(state.tasks):
        task = state.tasks[task_id]
        misfit = never_fits(state, task.spec, by_size(state))
        # One that waits for its back-off is looked at when it comes back, or when the GPUs change.
        looked_at = task_id in state.unfitted or task_id in {event.task for event in _recovered(state, now)}
        if misfit is not None and looked_at and isinstance(task.status, Pending):
            due.append(TaskFinished(now, task_id, NeverFits(misfit)))
    return due


def _recovered(state: State, now: float) -> list[RecoveryDue]:
    return [event for event in _ends_and_recoveries(state, now) if isinstance(event, RecoveryDue)]


def _to_store(state: State, now: float) -> list[MemoryObserved]:
    found: list[MemoryObserved] = []
    for task_id, key in state.active.items():
        track, task = state.tracks[key], state.tasks[task_id]
        if track.peak_mib is None or not isinstance(task.status, Running):
            continue
        known = task.attempts[-1].observed_mib
        if known is None or track.peak_mib > known + max(64, known // 20):
            found.append(MemoryObserved(now, key, track.peak_mib, track.energy_j, track.activity, track.used_s))
    return found


def _shrinks(state: State, now: float) -> list[BookingShrunk]:
    if not (state.rules.memory.shrink and state.rules.sharing.watchdog):
        return []
    due: list[BookingShrunk] = []
    for task_id, key in state.active.items():
        task, track = state.tasks[task_id], state.tracks[key]
        booking, status = task.attempts[-1].placement.booking, task.status
        retries = task.spec.max_oom_retries
        once = (state.rules.recovery.retries if retries is None else retries) == 0
        if not isinstance(status, Running) or status.ending is not None or track.peak_mib is None or once:
            continue
        if booking.alone or booking.source in KEPT:
            continue
        enough_mib = max(with_margin(track.peak_mib), known_mib(task))
        if enough_mib + state.rules.warmup.growth_mib <= booking.memory_mib and settled_everywhere(state, track):
            due.append(BookingShrunk(now, key, booking.memory_mib, enough_mib, track.peak_mib))
    return due


def schedule_plainly(state: State, now: float) -> list[TaskPlaced]:
    """The walk that `explain` and `waiting` go, with each of its choices written out whole."""
    if not state.line or not state.gpus:
        return []
    walk = Pass(state, now)
    placed: list[TaskPlaced] = []
    for task in turns(state, now, walk):
        choice = walk.consider(task)
        placement = placement_of(choice)
        if placement is None:
            continue
        decision = conclude(choice, state.policy.name, now)
        kept = sorted(decision.verdicts, key=lambda verdict: not verdict.chosen)[:KEPT_VERDICTS]
        key = AttemptKey(task.id, task.key.attempt + 1)
        placed.append(TaskPlaced(now, key, placement, decision.reason, walk.overtakes(choice), tuple(kept)))
        if task.spec.array is not None:
            array = task.spec.array.array
            walk.started[array] = walk.started.get(array, 0) + 1
        if len(placed) >= PLACED_AT_ONCE:
            break
    return placed
