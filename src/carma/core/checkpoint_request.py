"""Requests to save a checkpoint and leave: the effects of the request, of the end, and of the end of the grace period.

Only a task that declares a checkpoint signal is asked. If it ends within the grace period, it was preempted and returns
to the queue, whatever its exit code. If it does not end, it goes on. `preemption.py` decides which tasks are asked.
"""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.commands import Command, PreemptAttempt
from carma.core.model.events import AttemptEnded, PreemptionMissed, PreemptionRequested
from carma.core.model.outcome import Failed, Outcome, OutOfMemory, Preempted, Succeeded
from carma.core.model.status import Preempting, Running, Starting
from carma.core.model.task import Task
from carma.core.pausing import end_pause
from carma.core.state import State

LATE_S = 2.0  # an end is observed and stored a little after it happened


def requested(state: State, task: Task, event: PreemptionRequested) -> list[Command]:
    """A repeated request sends no second signal, but it can add `hold`."""
    status = task.status
    if not isinstance(status, Running) or status.ending is not None or task.spec.checkpoint is None:
        return []
    if status.preempting is not None:
        held = replace(status.preempting, hold=status.preempting.hold or event.hold)
        state.put(replace(task, status=replace(status, preempting=held)))
        return []
    task, continues = end_pause(state, task, event.at)
    assert isinstance(task.status, Running)
    asked = request_of(event)
    state.put(replace(task, status=replace(task.status, preempting=asked, stayed_at=None)))
    return [*continues, PreemptAttempt(task.key, asked.signal, asked.at)]


def request_of(event: PreemptionRequested) -> Preempting:
    return Preempting(
        at=event.at,
        until=event.at + event.grace_s,
        signal=event.signal,
        by=event.by,
        reason=event.reason,
        hold=event.hold,
        room_for=event.room_for,
    )


def missed(state: State, task: Task, event: PreemptionMissed) -> list[Command]:
    status = task.status
    if isinstance(status, Running) and status.preempting is not None:
        state.put(replace(task, status=replace(status, preempting=None, stayed_at=event.at)))
    return []


def is_over(asked: Preempting, at: float) -> bool:
    """Whether an end at that time is too late."""
    return at > asked.until + LATE_S


def outcome_of(status: Starting | Running, event: AttemptEnded) -> Outcome:
    """How an attempt ended. A stop or a preemption that was requested replaces the exit code of the process."""
    if status.ending is not None:
        return status.ending
    asked = status.preempting if isinstance(status, Running) else None
    return event.outcome if asked is None else outcome_after(asked, event)


def outcome_after(asked: Preempting, event: AttemptEnded) -> Outcome:
    """The outcome of an attempt that was asked to leave. It ended by itself if no process got the signal."""
    if event.untold or is_over(asked, event.at):
        return event.outcome
    return Preempted(asked.by, asked.reason, _exit_code(event.outcome))


def _exit_code(outcome: Outcome) -> int | None:
    match outcome:
        case Succeeded():
            return 0
        case Failed(code=code) | OutOfMemory(code=code):
            return code
        case _:
            return None


def held_after(status: Starting | Running, outcome: Outcome) -> bool:
    """Whether the task is held when it returns to the queue."""
    asked = status.preempting if isinstance(status, Running) else None
    return asked is not None and asked.hold and isinstance(outcome, Preempted)
