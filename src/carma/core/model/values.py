"""Frozen values: what a user submits, GPUs, estimates, samples and bookings.

Memory is the *footprint* in MiB (what the driver reports for the process) unless a name says otherwise. Times are
seconds since the epoch on the daemon's clock; they come with events and are never read here.
"""

from __future__ import annotations

from typing import Annotated, Literal, NewType

import msgspec
from msgspec import Meta

TaskId = NewType("TaskId", int)
LARGEST_ID = 2**62  # SQLite and clients of the API have 64-bit integers
GpuId = NewType("GpuId", str)  # the UUID; an index is for people only


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every frozen value. Unknown fields are refused, so that a newer file is not read partly."""


def tag_of(value: Record | type[Record]) -> str:
    """The tag of a value or class of a tagged union, as it is stored and shown."""
    return str(value.__struct_config__.tag)


class AttemptKey(Record, frozen=True, order=True):
    """Identifies one launch of one task. Every command carries it, so that commands are idempotent."""

    task: TaskId
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.task}.{self.attempt}"


class Owner(Record, frozen=True):
    """The submitter, from the kernel (SO_PEERCRED), never from the client."""

    uid: int
    gid: int
    name: str


class Dependency(Record, frozen=True):
    """`ok` waits for success, `any` for every end, `notok` for every end except success."""

    task: Annotated[TaskId, Meta(ge=1, le=LARGEST_ID)]
    when: Literal["ok", "any", "notok"] = "ok"

    @property
    def wanted_end(self) -> str:
        """What that task has to do, as a verb."""
        return {"ok": "succeed", "any": "end", "notok": "fail"}[self.when]


class ArrayPlace(Record, frozen=True):
    """The place of a task in an array. `at_once` is the maximum number of its tasks that run at the same time."""

    array: TaskId  # the id of the array's first task
    index: int
    at_once: int | None = None


class WarnSignal(Record, frozen=True):
    """`--signal USR1@60`: a signal `before_s` seconds before the time limit."""

    signal: int
    before_s: float


class SaveSignal(Record, frozen=True):
    """`--checkpoint-signal USR1`: on this signal the program saves a checkpoint and ends within `grace_s` seconds."""

    signal: int
    grace_s: float = 120.0


IdleAction = Literal["show", "pack", "end"]
NoticeKind = Literal["finish", "failure", "oom", "retry", "wait", "idle"]
DEFAULT_NOTICES: tuple[NoticeKind, ...] = ("finish", "failure", "oom", "wait", "idle")


class Notify(Record, frozen=True, kw_only=True):
    """Whom to notify of a task: `mailto:ADDRESS`, the URL of a webhook or of Apprise, or a command line."""

    targets: tuple[str, ...]
    on: tuple[NoticeKind, ...] = DEFAULT_NOTICES


Mechanism = Literal["timeslice", "mps", "mig"]  # how tasks share a GPU


class TaskSpec(Record, frozen=True, kw_only=True):
    """What the user submitted: everything that is needed to launch the task again."""

    command: tuple[str, ...]
    directory: str
    environment: dict[str, str] = {}
    umask: int = 0o022
    name: str = ""
    gpus: int = 1
    gpu_memory_mib: int | None = None  # declared by the user, per GPU
    exclusive: bool = False
    time_limit_s: float | None = None
    priority: int = 0
    after: tuple[Dependency, ...] = ()
    array: ArrayPlace | None = None
    begin_at: float | None = None
    max_oom_retries: int | None = None  # None: the server's setting
    grace_s: float | None = None  # between SIGTERM and SIGKILL; None: the server's setting
    warn: WarnSignal | None = None
    output: str | None = None  # file for stdout; %j id, %A array, %a index, %x name, %t attempt, %u user
    error: str | None = None
    comment: str = ""
    mechanism: Literal["timeslice", "mps"] | None = None  # None: the server's
    threads_percent: int | None = None  # share of the SMs under MPS; None: all
    checkpoint: SaveSignal | None = None  # None: the task cannot save on request
    progress: bool = True  # whether its optimizer steps are counted
    pause: bool = True  # whether CARMA itself may pause it; its user always may
    notify: Notify | None = None
    slurm: dict[str, str] | None = None  # of a script for sbatch: variables of Slurm besides those of its launch


class Demand(Record, frozen=True, omit_defaults=True):
    """How much of a GPU a task keeps busy when it runs alone: shares from 0 to 1.

    Unknown figures are not written, because virtual tasks of an older version refuse fields that they do not know.
    """

    sm_active: float
    sm_occupancy: float
    dram_active: float
    gr_active: float | None = None  # share of time with any kernel
    power: float | None = None  # share of the power range above idle


class Alone(Record, frozen=True, kw_only=True):
    """The estimated demand of an attempt without neighbours, and its mean speed beside its neighbours."""

    demand: Demand
    pace: float = 1.0  # predicted; 1: as fast as alone


class StepProgress(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The optimizer steps of an attempt. Rates are steps per second, without pauses such as evaluations."""

    steps: int
    per_s: float | None = None  # mean of the attempt
    alone_per_s: float | None = None  # while it was alone on its GPUs and had settled


class Deviation(Record, frozen=True, gc=False):
    """How far true rates lie from those of the sharing model, in standard deviations of the model's error."""

    mean: float
    variance: float


class Correction(Record, frozen=True, omit_defaults=True):
    """What observed steps tell of the rates of one command of one user (scheduling/rate_correction.py)."""

    command: str  # uid and a digest
    own: Deviation  # beside any other task
    beside: tuple[tuple[str, Deviation], ...] = ()  # beside that command; the newest comes last

    def __hash__(self) -> int:
        """Predictions are remembered by corrections; a hash of all deviations would take longer than they save."""
        return hash((self.command, self.own.mean))


class EstimateFigures(Record, frozen=True, kw_only=True):
    """Predicted memory per GPU of the task. `upper_mib` is booked; `source` is the name of the estimator."""

    footprint_mib: int
    upper_mib: int
    source: str
    level: float | None = None  # probability that `upper_mib` holds, if the estimator states one
    allocated_mib: int | None = None
    reserved_mib: int | None = None
    demand_predicted: bool = False  # whether `demand` was computed from a description, not observed in a run
    runtime_s: float | None = None
    alone_steps_per_s: float | None = None  # optimizer steps per second of the command alone
    gpu_model: str | None = None
    seconds: float = 0.0  # duration of the estimate itself
    steps_seen: int | None = None  # optimizer steps of a trial run
    rests_on: str = ""  # training data of a learned estimator
    parts_mib: dict[str, int] = {}  # parts of the footprint, if the estimator knows them
    warnings: tuple[str, ...] = ()


class Estimate(EstimateFigures, frozen=True, kw_only=True):
    demand: Demand | None = None


class NoEstimate(Record, frozen=True, kw_only=True):
    """The estimator does not know; `reason` is a sentence."""

    source: str
    reason: str
    more_than_mib: int | None = None  # known lower limit: this much was not enough in an earlier run


class Activity(Record, frozen=True, kw_only=True):
    """How busy a GPU is, or how busy one task keeps it: shares from 0 to 1. None means that it is not measured.

    The only list of activity metrics. The sources of `monitor` map their own names to these fields.
    """

    sm_active: float | None = None
    sm_occupancy: float | None = None
    dram_active: float | None = None
    gr_active: float | None = None  # share of time with any kernel
    tensor_active: float | None = None


ActivitySource = Literal["measured", "inferred", "none"]  # of SM activity, occupancy and DRAM activity
ACTIVITY_METRICS = Activity.__struct_fields__
NO_ACTIVITY = Activity()


class Capabilities(Record, frozen=True, kw_only=True):
    """Which figures a GPU provides. A figure that is not named here is None in every sample."""

    metrics: tuple[str, ...] = ()  # names of fields of Activity
    power: bool = False
    energy: bool = False
    processes: bool = False
    # Source of activity: "gpm", "dcgm", "virtual"; "inferred" (from power and coarse utilisation, so that `metrics` is
    # empty); "processes"; "nvml" (coarse utilisation only).
    source: str = ""


class Gpu(Record, frozen=True, kw_only=True):
    """A card, a MIG instance or a virtual GPU. `memory_mib` is what tasks can use."""

    id: GpuId
    index: int
    name: str
    memory_mib: int
    kind: Literal["card", "mig", "virtual"] = "card"
    capabilities: Capabilities = Capabilities()
    power_limit_w: float | None = None  # None: unknown, or of a card that it shares


class ProcessUse(Record, frozen=True, kw_only=True):
    """One process on one GPU. `attempt` is None for a foreign process (not started by CARMA)."""

    pid: int
    memory_mib: int | None = None
    sm_active: float | None = None
    attempt: AttemptKey | None = None
    name: str = ""


class GpuSample(Record, frozen=True, kw_only=True):
    """One sample of one GPU. None means "not measured", never 0. `fault` is a sentence if the GPU cannot be used."""

    gpu: GpuId
    at: float
    memory_used_mib: int | None = None
    activity: Activity = NO_ACTIVITY
    bound: Activity | None = None  # of inferred activity: nine in ten stay below it. None: `activity` is measured
    gpu_util: float | None = None  # coarse utilisation: share of time with any kernel
    memory_util: float | None = None  # share of time with any access to memory
    power_w: float | None = None
    energy_j: float | None = None  # a counter
    processes: tuple[ProcessUse, ...] | None = None
    fault: str | None = None


class Booking(Record, frozen=True, kw_only=True):
    """Memory that the ledger reserves on each GPU of an attempt, and the source of the figure."""

    memory_mib: int
    source: str
    alone: bool = False  # no other task on its GPUs
    cap_mib: int | None = None  # memory limit per GPU; None: no limit
    placed_mib: int | None = None  # first booking, if the booking has shrunk since


class Placement(Record, frozen=True, kw_only=True):
    gpus: tuple[GpuId, ...]
    booking: Booking


class Guard(Record, frozen=True, kw_only=True):
    """One mechanism that keeps an attempt within `limit_mib` on each of its GPUs. `how` is a phrase for users."""

    rung: Literal["framework", "mps", "cgroup", "watchdog"]
    limit_mib: int
    how: str = ""


class Confinement(Record, frozen=True, kw_only=True):
    """How an attempt shares its GPUs, and its memory guards. Decided at the launch."""

    mechanism: Mechanism
    guards: tuple[Guard, ...] = ()  # strictest first
    note: str = ""  # why the preferred mechanism or guard is not used


class Interpreter(Record, frozen=True):
    """A Python interpreter and the frameworks that it can import."""

    path: str
    versions: dict[str, str]  # framework -> version; "" if the version is unknown


class Frameworks(Record, frozen=True, kw_only=True):
    """The frameworks that a command could import.

    `certain`: the command runs exactly this one interpreter. Otherwise `interpreters` are all candidates.
    """

    interpreters: tuple[Interpreter, ...] = ()
    certain: bool = False
    set_by_command: frozenset[str] = frozenset()  # variables that the command line sets or removes (`env A=b`)
    clears_environment: bool = False  # `env -i`: variables that the launcher sets do not reach the program
    problem: str = ""  # why the files could not be read; a phrase

    def versions(self, framework: str) -> tuple[str, ...]:
        """All versions of a framework among the interpreters, without duplicates."""
        return tuple(sorted({one.versions[framework] for one in self.interpreters if framework in one.versions}))

    def reaches(self, variable: str) -> bool:
        """Whether a variable that the launcher sets reaches the program."""
        return not self.clears_environment and variable not in self.set_by_command


NO_FRAMEWORKS = Frameworks(problem="its files were not read")


class GpuUsage(Record, frozen=True, kw_only=True):
    """The use of one GPU within one hour, while it was observed. All figures are sums, so that rows can be added."""

    gpu: GpuId
    hour: int  # hours since the epoch
    watched_s: float = 0.0  # observed
    held_s: float = 0.0  # with at least one task
    shared_s: float = 0.0  # with two or more
    sm_s: float = 0.0  # SM activity, integrated
    energy_j: float = 0.0
    idle_j: float = 0.0  # of that: idle power times the observed time
    tasks_j: float = 0.0  # of that: attributed to tasks
    guessed_s: float = 0.0  # in use while its idle power was not measured yet
