"""Commands to the shell, in the imperative. Each can be repeated: its key tells whether it was carried out before."""

from __future__ import annotations

from carma.core.model.values import AttemptKey, Owner, Placement, Record, TaskId, TaskSpec


class EstimateTask(Record, frozen=True, tag=True):
    """The shell answers with TaskEstimated."""

    task: TaskId


class LaunchAttempt(Record, frozen=True, tag=True):
    """The shell answers with AttemptStarted or AttemptEnded."""

    key: AttemptKey
    owner: Owner
    spec: TaskSpec
    placement: Placement


class StopAttempt(Record, frozen=True, tag=True):
    """Send the signal to the whole process tree, and SIGKILL after `grace_s`. AttemptEnded follows."""

    key: AttemptKey
    grace_s: float
    signal: int = 15


class WarnAttempt(Record, frozen=True, tag=True):
    key: AttemptKey
    signal: int


class PreemptAttempt(Record, frozen=True, tag=True):
    """Send the checkpoint signal to the processes that handle it, once for each `asked_at`. Processes without a handler
    get no signal. AttemptEnded follows if the attempt ends."""

    key: AttemptKey
    signal: int
    asked_at: float


class SetPaused(Record, frozen=True, tag=True):
    """Stop the processes of the attempt, or let them continue. Neither is visible to the program as a signal that it
    could handle."""

    key: AttemptKey
    paused: bool


Command = EstimateTask | LaunchAttempt | StopAttempt | WarnAttempt | PreemptAttempt | SetPaused
