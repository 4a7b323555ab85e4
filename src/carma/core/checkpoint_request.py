"""An attempt that is asked to save and leave: what the request, the end and the end of the grace change.

Only a task that declares a signal for it is ever asked. Whatever it ends with, if it ends in time it was preempted and
comes back. If it does not end it goes on: nobody stops it for that. Who is asked, and when, is preempt.py's business.
"""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.commands import Command, PreemptAttempt
from carma.core.model.events import AttemptEnded, PreemptionMissed, PreemptionRequested
from carma.core.model.outcome import Failed, Outcome, OutOfMemory, Preempted, Succeeded
from carma.core.model.status import Preempting, Running, Starting
from carma.core.model.task import Task
from carma.core.state import State

LATE_S = 2.0  # an end is noticed, and written down, a little after it happened


def requested(state: State, task: Task, event: PreemptionRequested) -> list[Command]:
    """Asked again before it has left, it is not told again; but the task may be held after all."""
    status = task.status
    if not isinstance(status, Running) or status.ending is not None or task.spec.checkpoint is None:
        return []
    if status.preempting is not None:
        held = replace(status.preempting, hold=status.preempting.hold or event.hold)
        state.put(replace(task, status=replace(status, preempting=held)))
        return []
    asked = asked_by(event)
    state.put(replace(task, status=replace(status, preempting=asked, stayed_at=None)))
    return [PreemptAttempt(task.key, asked.signal, asked.at)]


def asked_by(event: PreemptionRequested) -> Preempting:
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
    """Whether an end at that time came too late."""
    return at > asked.until + LATE_S


def outcome_of(status: Starting | Running, event: AttemptEnded) -> Outcome:
    """How an attempt ended, which its process need not know: whoever was told to stop ended by that."""
    if status.ending is not None:
        return status.ending
    asked = status.preempting if isinstance(status, Running) else None
    return event.outcome if asked is None else left(asked, event)


def left(asked: Preempting, event: AttemptEnded) -> Outcome:
    """The end of one that was asked to leave. One that had no handler yet, and was not told, has ended by itself."""
    if event.untold or is_over(asked, event.at):
        return event.outcome
    return Preempted(asked.by, asked.reason, _code(event.outcome))


def _code(outcome: Outcome) -> int | None:
    match outcome:
        case Succeeded():
            return 0
        case Failed(code=code) | OutOfMemory(code=code):
            return code
        case _:
            return None


def held_after(status: Starting | Running, outcome: Outcome) -> bool:
    """Whether the task is to be held when it comes back."""
    asked = status.preempting if isinstance(status, Running) else None
    return asked is not None and asked.hold and isinstance(outcome, Preempted)
