"""The states of a task as a table: which event takes which status to which.

The documentation prints it, and tests compare it with what `machine.step` does. An event that has no row for a status
leaves that status as it is, because it arrived late or for the second time.
"""

from __future__ import annotations

from typing import NamedTuple

from carma.core.model import events as e
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting, Status


class Transition(NamedTuple):
    before: type[Status] | None  # None: the task is not in the state
    event: type[e.Durable]
    after: type[Status]
    meaning: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition(None, e.TaskSubmitted, Estimating, "The task is stored and acknowledged."),
    Transition(None, e.TaskRestored, Finished, "A finished task is taken out of the archive to be retried."),
    Transition(Estimating, e.TaskEstimated, Queued, "Its memory was estimated, or every source refused."),
    Transition(Estimating, e.TaskPlaced, Starting, "It starts without an estimate, alone on an idle GPU."),
    Transition(Estimating, e.TaskChanged, Estimating, "The user changed its memory: it is estimated again."),
    Transition(Estimating, e.TaskHeld, Estimating, "It is held once it is queued."),
    Transition(Estimating, e.TaskReleased, Estimating, "It is no longer held."),
    Transition(Estimating, e.StopRequested, Finished, "It was cancelled."),
    Transition(
        Estimating, e.TaskFinished, Finished, "It can never start: a dependency failed, or no GPU is large enough."
    ),
    Transition(Queued, e.TaskPlaced, Starting, "GPUs were chosen and its memory is booked on them."),
    Transition(Queued, e.TaskChanged, Estimating, "The user changed its memory: it is estimated again."),
    Transition(Queued, e.NoticeDue, Queued, "It has waited for long, and its user is notified."),
    Transition(Queued, e.TaskHeld, Queued, "It is held: not started until it is released."),
    Transition(Queued, e.TaskReleased, Queued, "It may start again."),
    Transition(Queued, e.StopRequested, Finished, "It was cancelled."),
    Transition(Queued, e.TaskFinished, Finished, "It can never start: a dependency failed, or no GPU is large enough."),
    Transition(Starting, e.AttemptStarted, Running, "Its process was started."),
    Transition(Starting, e.TaskEstimated, Starting, "Its estimate arrived late: it books that."),
    Transition(Starting, e.StopRequested, Starting, "It is to stop; the process gets the signal as soon as it exists."),
    Transition(Starting, e.AttemptEnded, Ended, "The launch failed, or the process ended before its start was seen."),
    Transition(Running, e.TaskEstimated, Running, "Its estimate arrived late: it books that."),
    Transition(Running, e.BookingShrunk, Running, "It needs less memory than booked; the rest is free for others."),
    Transition(Running, e.TaskWarned, Running, "The warning signal before its time limit is sent."),
    Transition(Running, e.PreemptionRequested, Running, "It is asked to save a checkpoint and leave."),
    Transition(Running, e.PreemptionMissed, Running, "It was asked to leave and did not in time; it goes on."),
    Transition(Running, e.TaskPaused, Running, "Its processes stand still; its memory stays booked."),
    Transition(Running, e.TaskUnpaused, Running, "Its processes continue."),
    Transition(Running, e.IdleNoted, Running, "It holds memory and has not used the SMs for long."),
    Transition(Running, e.IdleOver, Running, "It uses the SMs again, or the daemon has restarted."),
    Transition(Running, e.StopRequested, Running, "Its processes get the signal, and SIGKILL after the grace period."),
    Transition(Running, e.AttemptEnded, Ended, "All of its processes have ended."),
    Transition(Ended, e.RecoveryPlanned, Recovering, "It is retried after a back-off."),
    Transition(Ended, e.TaskFinished, Finished, "It is not retried: the outcome of its attempt is the task's."),
    Transition(Ended, e.StopRequested, Finished, "It was cancelled."),
    Transition(Recovering, e.RecoveryDue, Queued, "The back-off is over."),
    Transition(Recovering, e.TaskChanged, Estimating, "The user changed its memory: it is estimated again."),
    Transition(Recovering, e.StopRequested, Finished, "It was cancelled."),
    Transition(Recovering, e.TaskFinished, Finished, "It can never start: no GPU is large enough any more."),
    Transition(Finished, e.TaskRetried, Queued, "The user retries it."),
)
