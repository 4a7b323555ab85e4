"""The settings of decisions, each with its default, unit and description. Frozen, and part of the state.

The settings file has the same names (`[gate] sm_active = 0.8`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from carma.core.model.values import Booking, Guard, IdleAction, NoticeKind, Record, TaskSpec

# Two arrays of the largest size (measured: such a queue takes about 55 MB of memory and 45 MB of disk).
WAITING_LIMIT = 20_000


class Gate(Record, frozen=True, kw_only=True):
    """Caps on the activity of a GPU that a further task may join. A missing metric never passes."""

    enabled: Annotated[bool, Meta(description="Check the activity of a GPU before tasks share it.")] = True
    sm_active: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on SM activity (published: 0.80).")] = 0.80
    sm_occupancy: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on SM occupancy (published: 0.45).")] = 0.45
    dram_active: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on DRAM activity (published: 0.40).")] = 0.40
    summary: Annotated[
        Literal["risk", "p95", "mean"],
        Meta(description="Summary of a window: the published risk formula, its 95th percentile, or its mean."),
    ] = "risk"
    combine: Annotated[
        Literal["any", "published"],
        Meta(
            description="any: one reached cap closes the GPU. published: the cap on SM activity and one of the other "
            "two must be reached, so that a GPU at 100 % SM activity can stay open."
        ),
    ] = "any"


class WindowRules(Record, frozen=True, kw_only=True):
    length_s: Annotated[float, Meta(gt=0.0, description="Length of the window of samples, in seconds.")] = 30.0
    min_samples: Annotated[
        int, Meta(ge=1, description="Minimum number of samples since a task last came or left, before a GPU is judged.")
    ] = 3
    stale_s: Annotated[
        float, Meta(gt=0.0, description="Age from which the newest sample counts as missing, in seconds.")
    ] = 15.0


class WarmUp(Record, frozen=True, kw_only=True):
    """The time until a task has settled. Meanwhile it books activity, and closes its GPU if its memory is not known and
    limited."""

    enabled: Annotated[
        bool, Meta(description="Until a task has settled, count what it books; close its GPU if its size is unknown.")
    ] = True
    settle_s: Annotated[
        float, Meta(ge=0.0, description="Time without memory growth after which a task has settled, in seconds.")
    ] = 20.0
    growth_mib: Annotated[int, Meta(ge=0, description="Memory growth up to this counts as none, in MiB.")] = 64
    activity_change: Annotated[
        float,
        Meta(ge=0.0, le=1.0, description="Maximum change of SM activity between the halves of the settling time."),
    ] = 0.15
    idle_s: Annotated[
        float,
        Meta(ge=0.0, description="A task that does not use the GPU stops closing it after this time, in seconds."),
    ] = 120.0
    limit_s: Annotated[
        float,
        Meta(ge=0.0, description="A task that does not settle stops closing it after this time, in seconds."),
    ] = 600.0


class Memory(Record, frozen=True, kw_only=True):
    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="Estimators of GPU memory, in the order in which they are asked. An empty list: no estimates; "
            "a task that runs out of memory is retried with more. The trial run (trace) is left out on virtual GPUs."
        ),
    ] = ("declared", "history", "trace")
    estimators_at_once: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Maximum number of trial runs, or other slow estimates, at the same time; users take turns. 0: "
            "half of the CPU cores, less on a host with little memory, two at least.",
        ),
    ] = 0
    trial_limit_s: Annotated[
        float, Meta(gt=0.0, description="Time limit of a trial run or another slow estimate, in seconds.")
    ] = 120.0
    trial_memory_mib: Annotated[int, Meta(ge=64, description="Host memory limit of a trial run, in MiB.")] = 8192
    level: Annotated[
        float,
        Meta(ge=0.5, lt=1.0, description="Probability with which the bound of a trial run's estimate must hold."),
    ] = 0.99
    shrink: Annotated[
        bool,
        Meta(
            description="Shrink a booking to the observed memory plus a margin once the task has settled. Figures that "
            "the user declared, and bookings of tasks alone on their GPUs, stay."
        ),
    ] = True
    wait_s: Annotated[
        float,
        Meta(
            ge=0.0,
            description="Time for which a task waits for its estimate before it may start without one, alone on an "
            "idle GPU, in seconds. Others join it once the estimate is there, or the task has settled.",
        ),
    ] = 1.0
    margin_mib: Annotated[
        int, Meta(ge=0, description="Memory of a shared GPU that stays free beside the bookings, in MiB.")
    ] = 512
    unknown_mib: Annotated[
        int,
        Meta(ge=1, description="Free memory needed and booked by a task of unknown size, in MiB (published: 5120)."),
    ] = 5120


class PlacementRules(Record, frozen=True, kw_only=True):
    policy: Annotated[
        str,
        Meta(
            description="Placement policy: goodput, exclusive, round-robin, first-fit, best-fit, magm, lug, horus, "
            "lucid, or the name of a plugin."
        ),
    ] = "goodput"
    slowdown_cap: Annotated[
        float,
        Meta(
            ge=1.0,
            description="goodput: maximum expected slowdown (time taken / time alone) of each task on a shared GPU.",
        ),
    ] = 1.5
    slowdown_limit: Annotated[
        float,
        Meta(
            ge=1.0,
            description="goodput: maximum slowdown in a bad case, in which tasks of unknown demand are as demanding as "
            "the most demanding tenth of the tasks of their memory size. At least slowdown_cap counts.",
        ),
    ] = 1.8
    tasks_per_gpu: Annotated[int, Meta(ge=1, description="Maximum number of tasks on one GPU.")] = 4
    idle_first: Annotated[bool, Meta(description="Use a GPU without tasks before sharing one (as published).")] = True
    gpus: Annotated[tuple[str, ...], Meta(description="GPUs that take tasks (UUIDs or indices); empty: all.")] = ()


class Sharing(Record, frozen=True, kw_only=True):
    """How tasks share a GPU, and what keeps each within its booking."""

    mechanism: Annotated[
        Literal["auto", "timeslice", "mps", "mig"],
        Meta(
            description="timeslice: plain processes. mps: an MPS server per user, which CARMA starts. mig: existing "
            "MIG instances only, one task on each. auto: mps where available, else timeslice."
        ),
    ] = "auto"
    caps: Annotated[
        bool,
        Meta(
            description="Limit each task to its booking with the limits of its framework and of MPS. A task of unknown "
            "size, or one that ran out of memory before, is limited to the memory that was free at its start."
        ),
    ] = True
    context_mib: Annotated[
        int,
        Meta(ge=0, description="Memory of a process outside its framework's allocator, in MiB (H200: 760)."),
    ] = 800
    watchdog: Annotated[
        bool,
        Meta(description="Stop a task above its booking before it takes memory that its neighbours booked."),
    ] = True
    watch_s: Annotated[
        float,
        Meta(gt=0.0, le=60.0, description="Interval between memory samples of tasks without a limit, in seconds."),
    ] = 0.2

    def watchdog_guards(self, booking: Booking) -> tuple[Guard, ...]:
        """The watchdog's guard on an attempt with this booking; none if the attempt has its GPUs alone."""
        if not self.watchdog or booking.alone:
            return ()
        how = "stopped if it uses memory that its neighbours have booked"
        return (Guard(rung="watchdog", limit_mib=booking.memory_mib, how=how),)


class QueueRules(Record, frozen=True, kw_only=True):
    backfill_depth: Annotated[
        int, Meta(ge=0, description="Number of waiting tasks checked behind the first one that cannot start.")
    ] = 100
    overtakes: Annotated[
        int,
        Meta(ge=0, description="Number of tasks that may overtake a waiting task; then its GPUs are reserved for it."),
    ] = 20
    assumed_runtime_s: Annotated[
        float, Meta(gt=0.0, description="Assumed run time of a task without time limit or history, in seconds.")
    ] = 3600.0
    misfits: Annotated[
        Literal["wait", "end"],
        Meta(
            description="A waiting task that no longer fits, because GPUs are gone or smaller: wait keeps it, without "
            "delaying other tasks, until a GPU that fits is back; end ends it."
        ),
    ] = "wait"


class FairnessRules(Record, frozen=True, kw_only=True):
    """Order of tasks of the same priority: by the past use of their users in relation to their shares. Off: by the time
    of submission."""

    enabled: Annotated[bool, Meta(description="Order tasks by the past use of their users, not by submission.")] = False
    half_life_s: Annotated[
        float, Meta(ge=60.0, description="Time after which past use counts half, in seconds (a day).")
    ] = 86_400.0
    memory_weight: Annotated[
        float, Meta(ge=0.0, description="Weight of one hour of a whole GPU's memory, as booked.")
    ] = 1.0
    sm_weight: Annotated[
        float, Meta(ge=0.0, description="Weight of one hour of a whole GPU's SM activity, as measured.")
    ] = 1.0
    shares: Annotated[
        dict[str, Annotated[float, Meta(gt=0.0)]],
        Meta(description="Share of each user, by name; default is the share of all other users (1 if not set)."),
    ] = {}


class QuotaRules(Record, frozen=True, kw_only=True):
    """Maximum use by one user at a time. A number applies to every user; in a table by name, default applies to all
    other users. Without either, only waiting tasks are limited. Quotas apply to administrators too."""

    running: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(description="Maximum number of running tasks.")] = {}
    gpus: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(description="Maximum number of GPUs of all running tasks; a shared GPU counts once for each task on it."),
    ] = {}
    memory_share: Annotated[
        dict[str, Annotated[float, Meta(gt=0.0, le=1.0)]],
        Meta(
            description="Maximum booked memory, as a share of the server's GPU memory. A user without a running task "
            "may always start one."
        ),
    ] = {}
    waiting: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(
            description="Maximum number of waiting tasks; further submissions are refused. A user who is not named may "
            "have 20000 unless default says otherwise."
        ),
    ] = field(default_factory=lambda: {"default": WAITING_LIMIT})


class RecoveryRules(Record, frozen=True, kw_only=True):
    mode: Annotated[
        Literal["ladder", "alone"],
        Meta(
            description="How a task is retried. ladder: first where the memory that it asked for fits, then with a "
            "larger booking, then alone. alone: at once alone on its GPUs, before all other tasks (as published)."
        ),
    ] = "ladder"
    retries: Annotated[int, Meta(ge=0, description="Maximum number of retries after a GPU out-of-memory failure.")] = 4
    innocent_retries: Annotated[
        int,
        Meta(
            ge=0, description="Maximum number of retries after failures caused by a neighbour; not part of `retries`."
        ),
    ] = 5
    margin_mib: Annotated[
        int, Meta(ge=0, description="Added to the peak and the requested bytes for the next booking, in MiB.")
    ] = 1024
    growth: Annotated[float, Meta(ge=1.0, description="Minimum ratio of the next booking to the last one.")] = 1.5
    backoff_s: Annotated[
        float, Meta(ge=0.0, description="Wait before the first retry, in seconds; doubles each time.")
    ] = 2.0
    backoff_limit_s: Annotated[float, Meta(ge=0.0, description="Longest wait before a retry, in seconds.")] = 60.0


class Preemption(Record, frozen=True, kw_only=True):
    """Tasks that can save a checkpoint on a signal may be asked to, and are resumed later. Other tasks never are."""

    enabled: Annotated[
        bool,
        Meta(
            description="Let CARMA preempt tasks that can checkpoint: tasks of lower priority for the first task in "
            "the queue, and tasks that the policy wants to move. `carma preempt` works in any case."
        ),
    ] = False
    after_s: Annotated[
        float, Meta(ge=0.0, description="Waiting time of a task before others are preempted for it, in seconds.")
    ] = 60.0
    least_run_s: Annotated[
        float, Meta(ge=0.0, description="Minimum run time of an attempt before CARMA preempts it, in seconds.")
    ] = 300.0
    again_s: Annotated[
        float,
        Meta(ge=0.0, description="Time before a task that did not leave is asked again, in seconds."),
    ] = 900.0


class Undo(Record, frozen=True, kw_only=True):
    """Undo of sharing that slows a task down beyond placement.slowdown_limit, as its optimizer steps show."""

    enabled: Annotated[
        bool,
        Meta(
            description="Keep further tasks from a GPU on which a task is slowed down beyond the limit, and pause its "
            "newest task for a while, or move one that can checkpoint (with preemption.enabled)."
        ),
    ] = True
    after_s: Annotated[
        float, Meta(ge=10.0, description="Time for which a task must be slowed down beyond the limit, in seconds.")
    ] = 60.0
    pause_limit_s: Annotated[
        float,
        Meta(
            ge=0.0,
            description="Longest pause of a task, and of all pauses for one slowed task within an hour, in seconds. 0: "
            "CARMA pauses no task.",
        ),
    ] = 600.0


class Stopping(Record, frozen=True, kw_only=True):
    grace_s: Annotated[
        float, Meta(ge=0.0, description="Time between SIGTERM and SIGKILL, in seconds, unless the task sets its own.")
    ] = 10.0

    def grace_of(self, spec: TaskSpec) -> float:
        """Seconds between SIGTERM and SIGKILL: the task's own value, otherwise that of the server."""
        return self.grace_s if spec.grace_s is None else spec.grace_s


class IdleRules(Record, frozen=True, kw_only=True):
    """Tasks that hold GPU memory without using the SMs. They are shown in any case."""

    after_s: Annotated[
        float, Meta(ge=0.0, description="Time without use of the SMs after which a task is an idle holder; 0: never.")
    ] = 1800.0
    action: Annotated[
        IdleAction,
        Meta(
            description="show: only show it and notify its user. pack: place others as if it used no SMs. end: end it "
            "after a warning."
        ),
    ] = "show"
    warn_s: Annotated[
        float, Meta(ge=0.0, description="end: time between the warning, which is a notice, and the end, in seconds.")
    ] = 600.0


class NotifyRules(Record, frozen=True, kw_only=True):
    """Notices of tasks to the administrator, and what those to users need."""

    targets_file: Annotated[
        str,
        Meta(description="File with the targets of the administrator, one in each line; empty: none."),
    ] = ""
    on: Annotated[
        tuple[NoticeKind, ...],
        Meta(description="Events of all tasks to notify these targets of: finish, failure, oom, retry, wait, idle."),
    ] = ("failure", "oom")
    wait_s: Annotated[
        float, Meta(gt=0.0, description="Time in the queue after which a notice of a long wait is due, in seconds.")
    ] = 3600.0
    smtp: Annotated[str, Meta(description="Mail server, as HOST or HOST:PORT.")] = "localhost"
    sender: Annotated[str, Meta(description="Sender of mails; empty: carma@ and the name of the machine.")] = ""

    @property
    def server_kinds(self) -> tuple[NoticeKind, ...]:
        return self.on if self.targets_file else ()


class Rules(Record, frozen=True, kw_only=True):
    """All settings of decisions."""

    placement: PlacementRules = PlacementRules()
    gate: Gate = Gate()
    window: WindowRules = WindowRules()
    warmup: WarmUp = WarmUp()
    memory: Memory = Memory()
    sharing: Sharing = Sharing()
    queue: QueueRules = QueueRules()
    fairness: FairnessRules = FairnessRules()
    quota: QuotaRules = QuotaRules()
    recovery: RecoveryRules = RecoveryRules()
    preemption: Preemption = Preemption()
    undo: Undo = Undo()
    stopping: Stopping = Stopping()
    idle: IdleRules = IdleRules()
    notify: NotifyRules = NotifyRules()
