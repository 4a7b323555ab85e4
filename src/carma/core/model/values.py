"""The nouns: what a user submits, what it runs on, what was predicted and what was seen. All frozen.

Memory is always MiB of *footprint* (what the driver reports for the process) unless a name says otherwise.
Times are seconds since the epoch on the daemon's clock; they arrive with events and are never read here.
"""

from __future__ import annotations

from typing import Annotated, Literal, NewType

import msgspec
from msgspec import Meta

TaskId = NewType("TaskId", int)
LARGEST_ID = 2**62  # SQLite and the API's clients hold 64 bits
GpuId = NewType("GpuId", str)  # the UUID; an index is for people only


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every frozen value. Unknown fields are refused, so that a newer file is noticed and not half read."""


class AttemptKey(Record, frozen=True, order=True):
    """Names one launch of one task; every command carries it, so that a repeated command does no harm."""

    task: TaskId
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.task}.{self.attempt}"


class Owner(Record, frozen=True):
    """Who submitted, as the kernel told us (SO_PEERCRED), never as the client claimed."""

    uid: int
    gid: int
    name: str


class Dependency(Record, frozen=True):
    """`ok` waits for success, `any` for an end of any kind, `notok` for anything but success."""

    task: Annotated[TaskId, Meta(ge=1, le=LARGEST_ID)]
    when: Literal["ok", "any", "notok"] = "ok"


class ArrayPlace(Record, frozen=True):
    """The place of a task in an array; `at_once` bounds how many of the array run at the same time."""

    array: TaskId  # the id of the array's first task
    index: int
    at_once: int | None = None


class WarnSignal(Record, frozen=True):
    """`--signal USR1@60`: this signal, so many seconds before the time limit."""

    signal: int
    before_s: float


class SaveSignal(Record, frozen=True):
    """`--checkpoint-signal USR1`: on this signal the program saves and ends, within so many seconds."""

    signal: int
    grace_s: float = 120.0


Mechanism = Literal["timeslice", "mps", "mig"]  # how tasks share a card


class TaskSpec(Record, frozen=True, kw_only=True):
    """What the user asked for. Everything needed to launch it again is here."""

    command: tuple[str, ...]
    directory: str
    environment: dict[str, str] = {}
    umask: int = 0o022
    name: str = ""
    gpus: int = 1
    gpu_memory_mib: int | None = None  # declared by the user, for each GPU
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
    threads_percent: int | None = None  # of the SMs, under MPS; None: all of them
    checkpoint: SaveSignal | None = None  # None: it cannot be asked to save, and never is


class Demand(Record, frozen=True, omit_defaults=True):
    """How much of a GPU a task keeps busy when it runs alone; each 0 to 1.

    What is not given is not written either: virtual tasks of an older version read it and refuse what they do not know.
    """

    sm_active: float
    sm_occupancy: float
    dram_active: float
    gr_active: float | None = None  # the share of time with any kernel
    power: float | None = None  # of what the card can draw above idle


class Alone(Record, frozen=True, kw_only=True):
    """What an attempt would show if it had its GPUs alone, and how fast it went beside its neighbours, on average."""

    demand: Demand
    pace: float = 1.0  # predicted; 1 is as fast as alone


class Estimate(Record, frozen=True, kw_only=True):
    """Predicted memory for each GPU of the task. `upper_mib` is what is booked; `source` says who answered."""

    footprint_mib: int
    upper_mib: int
    source: str
    level: float | None = None  # the probability with which `upper_mib` is said to hold, where one is stated
    allocated_mib: int | None = None
    reserved_mib: int | None = None
    demand: Demand | None = None
    demand_predicted: bool = False  # whether it was worked out from a description, and not seen in a run
    runtime_s: float | None = None
    gpu_model: str | None = None
    seconds: float = 0.0  # what the estimate itself took
    steps_seen: int | None = None  # optimizer steps of a trial run
    rests_on: str = ""  # what was learned, and from what, where the source has learned
    parts_mib: dict[str, int] = {}  # what the footprint is made of, where the source can tell
    warnings: tuple[str, ...] = ()


class NoEstimate(Record, frozen=True, kw_only=True):
    """A refusal to guess, which is a good answer; `reason` is a sentence."""

    source: str
    reason: str
    more_than_mib: int | None = None  # all that it knows: so much was not enough. Whoever answers must say more


class Activity(Record, frozen=True, kw_only=True):
    """How busy a GPU is, or how busy one task keeps it: shares from 0 to 1. None means that it is not measured.

    The only list of activity metrics. The sources of `monitor` map their own names to these fields.
    """

    sm_active: float | None = None
    sm_occupancy: float | None = None
    dram_active: float | None = None
    gr_active: float | None = None  # share of time with any kernel
    tensor_active: float | None = None


ACTIVITY_METRICS = Activity.__struct_fields__
NO_ACTIVITY = Activity()


class Capabilities(Record, frozen=True, kw_only=True):
    """Which figures a GPU provides. A figure that is not named here is None in every sample."""

    metrics: tuple[str, ...] = ()  # names of fields of Activity
    power: bool = False
    energy: bool = False
    processes: bool = False
    source: str = ""  # source of activity: "gpm", "dcgm", "processes", "nvml" (coarse utilisation only), "virtual"


class Gpu(Record, frozen=True, kw_only=True):
    """A card, a MIG instance or a virtual GPU. `memory_mib` is what tasks can use."""

    id: GpuId
    index: int
    name: str
    memory_mib: int
    kind: Literal["card", "mig", "virtual"] = "card"
    capabilities: Capabilities = Capabilities()


class ProcessUse(Record, frozen=True, kw_only=True):
    """One process on one GPU. `attempt` is None for a foreign process (one that CARMA did not start)."""

    pid: int
    memory_mib: int | None = None
    sm_active: float | None = None
    attempt: AttemptKey | None = None
    name: str = ""


class GpuSample(Record, frozen=True, kw_only=True):
    """One look at one GPU. None means "not given", never 0. `fault` is a sentence when the GPU cannot be used."""

    gpu: GpuId
    at: float
    memory_used_mib: int | None = None
    activity: Activity = NO_ACTIVITY
    gpu_util: float | None = None  # the coarse figure; shown, never decided on
    power_w: float | None = None
    energy_j: float | None = None  # a counter
    processes: tuple[ProcessUse, ...] | None = None
    fault: str | None = None


class Booking(Record, frozen=True, kw_only=True):
    """Memory that the ledger holds on each GPU of an attempt, and where the figure comes from."""

    memory_mib: int
    source: str
    alone: bool = False  # nobody else on its GPUs
    cap_mib: int | None = None  # where it is stopped, on each GPU; None: nowhere
    placed_mib: int | None = None  # what was booked at first, where the first steps have made it less


class Placement(Record, frozen=True, kw_only=True):
    gpus: tuple[GpuId, ...]
    booking: Booking


class Guard(Record, frozen=True, kw_only=True):
    """One rung that keeps an attempt within `limit_mib` on each of its GPUs. `how` is a phrase for people."""

    rung: Literal["framework", "mps", "cgroup", "watchdog"]
    limit_mib: int
    how: str = ""


class Confinement(Record, frozen=True, kw_only=True):
    """How an attempt shares its GPUs, and what holds it. Decided when it is launched, and kept with it."""

    mechanism: Mechanism
    guards: tuple[Guard, ...] = ()  # the hardest first
    note: str = ""  # why not the mechanism, or the rung, that one would expect


class Interpreter(Record, frozen=True):
    """A Python interpreter and the frameworks that it would import."""

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
        """All versions of it among the interpreters, each once."""
        return tuple(sorted({one.versions[framework] for one in self.interpreters if framework in one.versions}))

    def reaches(self, variable: str) -> bool:
        """Whether a variable that the launcher sets reaches the program."""
        return not self.clears_environment and variable not in self.set_by_command


class GpuUsage(Record, frozen=True, kw_only=True):
    """What one GPU did within one hour, as far as it was watched. Sums, so that rows can be added up."""

    gpu: GpuId
    hour: int  # hours since the epoch
    watched_s: float = 0.0
    held_s: float = 0.0  # with at least one task
    shared_s: float = 0.0  # with two or more
    sm_s: float = 0.0  # SM activity, integrated
    energy_j: float = 0.0
    idle_j: float = 0.0  # of that: what the GPU takes with nobody on it
    tasks_j: float = 0.0  # of that: given to tasks
    guessed_s: float = 0.0  # while somebody was on it, and what it takes with nobody on it had not been seen yet
