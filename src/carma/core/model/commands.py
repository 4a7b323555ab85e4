"""What the shell must do, in the imperative. Each can be repeated: its key says whether it was done already."""

from __future__ import annotations

from carma.core.model.values import AttemptKey, Owner, Placement, Record, TaskId, TaskSpec


class EstimateTask(Record, frozen=True, tag=True):
    """Answer with TaskEstimated."""

    task: TaskId


class LaunchAttempt(Record, frozen=True, tag=True):
    """Answer with AttemptStarted or AttemptEnded."""

    key: AttemptKey
    owner: Owner
    spec: TaskSpec
    placement: Placement


class StopAttempt(Record, frozen=True, tag=True):
    """Signal the whole tree, then SIGKILL after `grace_s`. The answer is the AttemptEnded that follows."""

    key: AttemptKey
    grace_s: float
    signal: int = 15


class WarnAttempt(Record, frozen=True, tag=True):
    key: AttemptKey
    signal: int


class PreemptAttempt(Record, frozen=True, tag=True):
    """Ask it to save and leave: those of its processes that listen for the signal, once for each `asked_at`. Whoever
    does not listen is left alone. The answer is the AttemptEnded that follows, if one does."""

    key: AttemptKey
    signal: int
    asked_at: float


Command = EstimateTask | LaunchAttempt | StopAttempt | WarnAttempt | PreemptAttempt
