"""Events, named in the past tense.

Durable events are committed before `step` gets them; replaying them rebuilds the state. Transient events (the last
four) are not stored, because their consequences (a placement, a time limit) are durable events.
"""

from __future__ import annotations

from carma.core.model.decision import Verdict
from carma.core.model.outcome import Outcome
from carma.core.model.status import Ending
from carma.core.model.task import Plan, Task
from carma.core.model.values import (
    Activity,
    Alone,
    AttemptKey,
    Confinement,
    Correction,
    Estimate,
    Gpu,
    GpuId,
    GpuSample,
    GpuUsage,
    IdleAction,
    NoEstimate,
    NoticeKind,
    Owner,
    Placement,
    Record,
    StepProgress,
    TaskId,
    TaskSpec,
)


class Event(Record, frozen=True, tag_field="event"):
    at: float


class TaskSubmitted(Event, frozen=True, tag="task_submitted"):
    task: TaskId
    owner: Owner
    spec: TaskSpec
    held: bool = False


class TaskEstimated(Event, frozen=True, tag="task_estimated"):
    task: TaskId
    estimate: Estimate | None
    refusals: tuple[NoEstimate, ...] = ()
    fingerprint: str = ""  # of the program's files: history uses only runs with the same fingerprint


class TaskPlaced(Event, frozen=True, tag="task_placed"):
    """A decision. `why` explains it in one sentence."""

    key: AttemptKey
    placement: Placement
    why: str = ""
    overtook: TaskId | None = None  # the earlier waiting task that this task overtook
    verdicts: tuple[Verdict, ...] = ()  # on each GPU, up to a limit


class AttemptStarted(Event, frozen=True, tag="attempt_started"):
    key: AttemptKey
    pid: int
    confinement: Confinement | None = None


class MemoryObserved(Event, frozen=True, tag="memory_observed"):
    """The memory of an attempt grew by a relevant amount. Part of the task's story."""

    key: AttemptKey
    peak_mib: int
    energy_j: float | None = None
    activity: Activity | None = None
    used_s: float = 0.0  # GPU-seconds over which `activity` is the mean


class BookingShrunk(Event, frozen=True, tag="booking_shrunk"):
    """The first steps of the attempt showed that it needs less memory per GPU than booked."""

    key: AttemptKey
    from_mib: int
    to_mib: int
    peak_mib: int  # highest memory observed until then


class AttemptUse(Record, frozen=True, kw_only=True):
    """What was observed so far of a running attempt."""

    key: AttemptKey
    peak_mib: int | None = None
    energy_j: float | None = None
    activity: Activity | None = None
    used_s: float = 0.0
    alone: Alone | None = None
    settled: bool = False  # on all of its GPUs
    progress: StepProgress | None = None


class UseNoted(Event, frozen=True, tag="use_noted"):
    """Observations that a restart must keep; stored every minute and whenever the energy of an attempt is stored.

    One event covers all GPUs and attempts, because their energy must refer to the same moment. `gpus` is the use since
    the previous event. It belongs to no task: the next checkpoint drops it from the log.
    """

    attempts: tuple[AttemptUse, ...] = ()
    gpus: tuple[GpuUsage, ...] = ()
    idle_w: dict[GpuId, float] = {}  # idle power of each GPU where it was measured
    empty_w: dict[GpuId, float] = {}  # lowest single reading of idle power, used until `idle_w` is measured
    corrections: tuple[Correction, ...] = ()  # that have changed


class AttemptEnded(Event, frozen=True, tag="attempt_ended"):
    key: AttemptKey
    outcome: Outcome
    peak_mib: int | None = None
    energy_j: float | None = None
    # Attempts on the same GPUs that held more memory than booked at that moment (only for a GPU OOM).
    over_booking: tuple[AttemptKey, ...] = ()
    activity: Activity | None = None
    used_s: float = 0.0  # GPU-seconds over which `activity` is the mean
    alone: Alone | None = None
    untold: bool = False  # a checkpoint was requested, but no process received the signal
    progress: StepProgress | None = None


class RecoveryPlanned(Event, frozen=True, tag="recovery_planned"):
    """The task waits until `until`, then returns to the queue with `plan`."""

    task: TaskId
    plan: Plan
    until: float


class RecoveryDue(Event, frozen=True, tag="recovery_due"):
    task: TaskId


class TaskFinished(Event, frozen=True, tag="task_finished"):
    """The task is over: its last attempt ended, or it never had one."""

    task: TaskId
    outcome: Outcome


class StopRequested(Event, frozen=True, tag="stop_requested"):
    """The task was cancelled, reached its time limit, or must leave its GPUs. A task without a process ends at once."""

    task: TaskId
    ending: Ending
    grace_s: float
    signal: int = 15


class TaskWarned(Event, frozen=True, tag="task_warned"):
    task: TaskId
    signal: int


class PreemptionRequested(Event, frozen=True, tag="preemption_requested"):
    """A running task was asked to save a checkpoint and leave: by a user, or by CARMA for the waiting task `room_for`
    or to move it."""

    task: TaskId
    by: str
    signal: int
    grace_s: float
    reason: str = ""
    hold: bool = False
    room_for: TaskId | None = None


class PreemptionMissed(Event, frozen=True, tag="preemption_missed"):
    """The task did not leave within the grace period of a preemption request. It goes on."""

    task: TaskId


class TaskPaused(Event, frozen=True, tag="task_paused"):
    """The processes of a running task are to stand still: at the request of a user, or of CARMA itself."""

    task: TaskId
    by: str
    reason: str = ""
    until: float | None = None
    slowed: TaskId | None = None  # the neighbour for which CARMA pauses it
    slowdown: float | None = None  # of that neighbour, as measured


class TaskUnpaused(Event, frozen=True, tag="task_unpaused"):
    """`faster`: whether the slowed neighbour was clearly faster during the pause; None: not tested."""

    task: TaskId
    by: str
    reason: str = ""
    faster: bool | None = None


class NoticeDue(Event, frozen=True, tag="notice_due"):
    """The task has waited for `notify.wait_s`, and a notice of that is wanted."""

    task: TaskId


class NoticeSent(Event, frozen=True, tag="notice_sent"):
    """A notice of that kind, of the event at `about_at`, was sent. `sent_to`: the kinds of its targets that took it;
    `problems`: why others did not. It is not sent again."""

    task: TaskId
    kind: NoticeKind
    about_at: float
    sent_to: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class IdleNoted(Event, frozen=True, tag="idle_noted"):
    """The running task holds memory and has not used the SMs since `since`."""

    task: TaskId
    since: float
    action: IdleAction


class IdleOver(Event, frozen=True, tag="idle_over"):
    """The task uses the SMs again, or the daemon that observed it has ended."""

    task: TaskId


class TaskHeld(Event, frozen=True, tag="task_held"):
    task: TaskId


class TaskReleased(Event, frozen=True, tag="task_released"):
    task: TaskId


class TaskRetried(Event, frozen=True, tag="task_retried"):
    """A user queued a finished task again. The plan of recovery is kept unless `fresh`."""

    task: TaskId
    fresh: bool = False


class TaskRestored(Event, frozen=True, tag="task_restored"):
    """A finished task was taken out of the archive to be retried."""

    task: Task


class TaskChanged(Event, frozen=True, tag="task_changed"):
    """`carma update`. Only fields that are not None change."""

    task: TaskId
    name: str | None = None
    priority: int | None = None
    gpu_memory_mib: int | None = None
    time_limit_s: float | None = None
    comment: str | None = None


class GpusFound(Event, frozen=True, tag="gpus_found"):
    """The GPUs of this server, at the start and whenever the set changes."""

    gpus: tuple[Gpu, ...]


class GpuDrained(Event, frozen=True, tag="gpu_drained"):
    """No new task starts on this GPU. None means the whole server."""

    gpu: GpuId | None
    reason: str = ""


class GpuResumed(Event, frozen=True, tag="gpu_resumed"):
    """None ends the drain of the server. A GPU that was drained individually stays drained."""

    gpu: GpuId | None


GpuEvent = GpusFound | GpuDrained | GpuResumed | UseNoted
AttemptEvent = TaskPlaced | AttemptStarted | MemoryObserved | BookingShrunk | AttemptEnded
TaskEvent = (
    TaskSubmitted
    | TaskEstimated
    | RecoveryPlanned
    | RecoveryDue
    | TaskFinished
    | StopRequested
    | TaskWarned
    | PreemptionRequested
    | PreemptionMissed
    | TaskPaused
    | TaskUnpaused
    | NoticeDue
    | NoticeSent
    | IdleNoted
    | IdleOver
    | TaskHeld
    | TaskReleased
    | TaskRetried
    | TaskRestored
    | TaskChanged
)
Durable = GpuEvent | AttemptEvent | TaskEvent


def task_of(event: Durable) -> TaskId | None:
    """The task of an event; None for events of GPUs and of all tasks together."""
    if isinstance(event, GpuEvent):
        return None
    if isinstance(event, AttemptEvent):
        return event.key.task
    return event.task.id if isinstance(event, TaskRestored) else event.task


class GpusSampled(Event, frozen=True, tag="gpus_sampled"):
    samples: tuple[GpuSample, ...]


class MemorySampled(Event, frozen=True, tag="memory_sampled"):
    """Memory and processes between two full samples: only `memory_used_mib` and `processes` are set."""

    samples: tuple[GpuSample, ...]


class AttemptSteps(Record, frozen=True):
    """The optimizer steps of an attempt until now, and the time of the last one."""

    key: AttemptKey
    steps: int
    last_at: float


class StepsCounted(Event, frozen=True, tag="steps_counted"):
    """Optimizer steps of running attempts, as read from their step files."""

    counts: tuple[AttemptSteps, ...]


class Ticked(Event, frozen=True, tag="ticked"):
    """Time passed. `step` only advances `state.now`."""


Transient = GpusSampled | MemorySampled | StepsCounted | Ticked
AnyEvent = Durable | Transient
