"""What happened, in the past tense. Durable events are committed before `step` sees them; replaying them rebuilds
the state. Those at the end are not stored: what they lead to (a placement, a time limit reached) is an event itself.
"""

from __future__ import annotations

from carma.core.model.outcome import Outcome
from carma.core.model.status import Ending
from carma.core.model.task import Plan, Task
from carma.core.model.values import (
    Activity,
    Alone,
    AttemptKey,
    Confinement,
    Estimate,
    Gpu,
    GpuId,
    GpuSample,
    GpuUsage,
    NoEstimate,
    Owner,
    Placement,
    Record,
    TaskId,
    TaskSpec,
)
from carma.core.scheduling.decision import Verdict


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
    fingerprint: str = ""  # of what the command would run: history takes only runs of the same for the same


class TaskPlaced(Event, frozen=True, tag="task_placed"):
    """A decision. `why` is its sentence."""

    key: AttemptKey
    placement: Placement
    why: str = ""
    overtook: TaskId | None = None  # the waiting task that this one went before
    verdicts: tuple[Verdict, ...] = ()  # what was thought of each GPU, a bounded number of them


class AttemptStarted(Event, frozen=True, tag="attempt_started"):
    key: AttemptKey
    pid: int
    confinement: Confinement | None = None


class MemoryObserved(Event, frozen=True, tag="memory_observed"):
    """What was seen of an attempt, when its memory grew enough to matter; part of the task's story."""

    key: AttemptKey
    peak_mib: int
    energy_j: float | None = None
    activity: Activity | None = None
    used_s: float = 0.0  # what `activity` is the mean over


class BookingShrunk(Event, frozen=True, tag="booking_shrunk"):
    """The attempt's first steps have shown that it takes less than was booked, on each of its GPUs."""

    key: AttemptKey
    from_mib: int
    to_mib: int
    peak_mib: int  # where it had settled


class AttemptUse(Record, frozen=True, kw_only=True):
    """What was seen so far of an attempt that runs."""

    key: AttemptKey
    peak_mib: int | None = None
    energy_j: float | None = None
    activity: Activity | None = None
    used_s: float = 0.0
    alone: Alone | None = None
    settled: bool = False  # on all of its GPUs


class UseNoted(Event, frozen=True, tag="use_noted"):
    """What was only seen, stored now and then, and whenever an attempt's energy is: a restart does not forget it.

    One event for all, because the GPUs' energy and that of their tasks must be of the same moment. `gpus` is what they
    did since the last such event. It belongs to no task: the log drops it with the next checkpoint.
    """

    attempts: tuple[AttemptUse, ...] = ()
    gpus: tuple[GpuUsage, ...] = ()
    idle_w: dict[GpuId, float] = {}  # what GPUs take with nobody on them, as far as it was seen
    empty_w: dict[GpuId, float] = {}  # of others: the lowest single reading of that, which counts until there is more


class AttemptEnded(Event, frozen=True, tag="attempt_ended"):
    key: AttemptKey
    outcome: Outcome
    peak_mib: int | None = None
    energy_j: float | None = None
    # Attempts on the same GPUs that held more than their booking at that moment (only for an OOM on the GPU).
    over_booking: tuple[AttemptKey, ...] = ()
    activity: Activity | None = None
    used_s: float = 0.0  # what `activity` is the mean over
    alone: Alone | None = None
    untold: bool = False  # it was asked to save, but nobody could tell it: it ended by itself


class RecoveryPlanned(Event, frozen=True, tag="recovery_planned"):
    """Retry: the task waits until `until`, then queues with `plan`."""

    task: TaskId
    plan: Plan
    until: float


class RecoveryDue(Event, frozen=True, tag="recovery_due"):
    task: TaskId


class TaskFinished(Event, frozen=True, tag="task_finished"):
    """The task itself is over (its last attempt ended, or it never had one)."""

    task: TaskId
    outcome: Outcome


class StopRequested(Event, frozen=True, tag="stop_requested"):
    """Cancelled by somebody or out of time; for a task that has no process it is the end."""

    task: TaskId
    ending: Ending
    grace_s: float
    signal: int = 15


class TaskWarned(Event, frozen=True, tag="task_warned"):
    task: TaskId
    signal: int


class PreemptionRequested(Event, frozen=True, tag="preemption_requested"):
    """A running task was asked to save and leave: by a user; by CARMA for another task (`room_for`), or to move it."""

    task: TaskId
    by: str
    signal: int
    grace_s: float
    reason: str = ""
    hold: bool = False
    room_for: TaskId | None = None


class PreemptionMissed(Event, frozen=True, tag="preemption_missed"):
    """It was asked, its grace is over, and it goes on as if nobody had asked."""

    task: TaskId


class TaskHeld(Event, frozen=True, tag="task_held"):
    task: TaskId


class TaskReleased(Event, frozen=True, tag="task_released"):
    task: TaskId


class TaskRetried(Event, frozen=True, tag="task_retried"):
    """A finished task, back in the queue by hand; what recovery had learnt is kept unless `fresh`."""

    task: TaskId
    fresh: bool = False


class TaskRestored(Event, frozen=True, tag="task_restored"):
    """A finished task, taken out of the archive so that it can be retried."""

    task: Task


class TaskChanged(Event, frozen=True, tag="task_changed"):
    """`carma update`: only what is not None changes."""

    task: TaskId
    name: str | None = None
    priority: int | None = None
    gpu_memory_mib: int | None = None
    time_limit_s: float | None = None
    comment: str | None = None


class GpusFound(Event, frozen=True, tag="gpus_found"):
    """The GPUs of this server, at its start and whenever the set changes."""

    gpus: tuple[Gpu, ...]


class GpuDrained(Event, frozen=True, tag="gpu_drained"):
    """No new task on this GPU; None means on the whole server."""

    gpu: GpuId | None
    reason: str = ""


class GpuResumed(Event, frozen=True, tag="gpu_resumed"):
    """None lifts the server's drain; a GPU that was drained by itself stays so."""

    gpu: GpuId | None


Durable = (
    TaskSubmitted
    | TaskEstimated
    | TaskPlaced
    | AttemptStarted
    | MemoryObserved
    | BookingShrunk
    | UseNoted
    | AttemptEnded
    | RecoveryPlanned
    | RecoveryDue
    | TaskFinished
    | StopRequested
    | TaskWarned
    | PreemptionRequested
    | PreemptionMissed
    | TaskHeld
    | TaskReleased
    | TaskRetried
    | TaskRestored
    | TaskChanged
    | GpusFound
    | GpuDrained
    | GpuResumed
)


class GpusSampled(Event, frozen=True, tag="gpus_sampled"):
    samples: tuple[GpuSample, ...]


class MemoryGlanced(Event, frozen=True, tag="memory_glanced"):
    """A quick look at memory alone, between two samples: each carries `memory_used_mib` and `processes` only."""

    samples: tuple[GpuSample, ...]


class Ticked(Event, frozen=True, tag="ticked"):
    """Time passed. It changes nothing by itself; `propose` looks at the clock it sets."""


Passing = GpusSampled | MemoryGlanced | Ticked
AnyEvent = Durable | Passing
