"""The protocols at the seams, with their values. Real GPUs, virtual GPUs and the simulator differ only behind them.

Each protocol has several implementations and one contract suite (`carma.testing`, `tests/contract`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from carma.core.model.events import Durable
from carma.core.model.outcome import Outcome
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import (
    NO_FRAMEWORKS,
    Activity,
    Alone,
    AttemptKey,
    Confinement,
    Correction,
    Estimate,
    Frameworks,
    Gpu,
    GpuId,
    GpuSample,
    GpuUsage,
    NoEstimate,
    Owner,
    Placement,
    Record,
    StepProgress,
    TaskId,
    TaskSpec,
    tag_of,
)
from carma.core.scheduling.fairness import UserUsage


class Sampler(Protocol):
    """Samples the GPUs. Never raises: a GPU that does not answer is a sample with a `fault`."""

    def gpus(self) -> tuple[Gpu, ...]: ...

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        """One sample for each GPU of `gpus()`; processes are not attributed yet (`attempt` is None)."""
        ...

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """Only memory and processes of these GPUs, which is cheap enough for several times per second."""
        ...

    def close(self) -> None: ...


class LaunchOrder(Record, frozen=True, kw_only=True):
    """Everything a launcher needs for one attempt."""

    key: AttemptKey
    owner: Owner
    spec: TaskSpec
    placement: Placement
    gpus: tuple[Gpu, ...]
    grace_s: float  # between SIGTERM and SIGKILL
    preempted: bool = False  # an earlier attempt was preempted, so that there may be a checkpoint
    frameworks: Frameworks = NO_FRAMEWORKS  # that the command would import


class Arranged(Record, frozen=True, kw_only=True):
    """How an attempt will share its GPUs."""

    confinement: Confinement
    environment: dict[str, str] = {}  # overrides the submitter's variables
    mps_server: str | None = None  # name of the MPS server under which it runs


class Confiner(Protocol):
    """Decides how an attempt shares its GPUs and which memory limits hold it."""

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Raises Refused if a demanded mechanism is not available."""
        ...


class AttemptReport(Record, frozen=True, kw_only=True):
    """What the launcher knows about an attempt.

    Without `pid` and `outcome`, and not `claimed`, the order was never carried out and may be given again.
    """

    key: AttemptKey
    pid: int | None = None
    started_at: float | None = None
    claimed: bool = False  # a runner has the order; with no pid it is starting the command, or cannot be asked now
    outcome: Outcome | None = None  # None: it has not ended
    ended_at: float | None = None
    confinement: Confinement | None = None  # None: it has not started
    trouble: str | None = None  # it runs, but a service that it depends on is gone: a sentence
    checkpoint_asked_at: float | None = None  # `asked_at` of the last delivered request, once it has ended


class Launcher(Protocol):
    """Starts attempts that outlive the daemon, and reports how they ended."""

    def launch(self, order: LaunchOrder) -> None:
        """Start the attempt; orders with the same key start one process. A failure to start is an outcome."""
        ...

    def poll(self, keys: Iterable[AttemptKey]) -> tuple[AttemptReport, ...]:
        """The current state of these attempts: one report per key, in order."""
        ...

    def signal(self, key: AttemptKey, signal: int) -> None:
        """Send a signal to the attempt's processes. No effect if they have ended."""
        ...

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        """Send the checkpoint signal to the processes that handle it, once for each `asked_at`. A process without a
        handler gets no signal, because it would end. Returns whether a process got it, now or before."""
        ...

    def pause(self, key: AttemptKey) -> bool:
        """Make all processes of the attempt stand still; their memory stays. Returns whether they do; repeated until
        then. A signal that stops an attempt also ends its pause."""
        ...

    def unpause(self, key: AttemptKey) -> bool:
        """Let them continue; no effect on an attempt that was not paused. Returns whether that is done."""
        ...

    def pids(self, keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        """The running processes of these attempts, including descendants."""
        ...

    def sharing_pids(self) -> frozenset[int]:
        """Processes through which attempts share GPUs and which belong to no attempt (MPS servers)."""
        ...

    def has_order(self, key: AttemptKey) -> bool:
        """Whether an order for this attempt ever arrived, also under an earlier daemon. Callable from any thread."""
        ...

    def release(self, key: AttemptKey) -> None:
        """The attempt's end is stored: delete its bookkeeping files. Its logs stay."""
        ...


class StepCount(Record, frozen=True):
    """The optimizer steps of an attempt so far, and the real seconds since the last one."""

    key: AttemptKey
    steps: int
    age_s: float


class StepCounters(Protocol):
    """Reads how many optimizer steps running attempts have made."""

    def read(self, keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
        """In the order of the keys, without attempts of which nothing is known. Never raises: tasks write the counts,
        so the figures are plausible numbers, but not necessarily true."""
        ...


class PastRun(Record, frozen=True, kw_only=True):
    """A finished attempt in the history, from which the estimator `history` learns."""

    key: AttemptKey
    uid: int
    command: tuple[str, ...]
    directory: str
    gpus: int
    gpu_model: str
    peak_mib: int | None
    runtime_s: float
    succeeded: bool
    collocated: bool
    ended_at: float
    energy_j: float | None = None
    activity: Activity | None = None
    alone: Alone | None = None
    fingerprint: str = ""  # of the program's files; "" if unknown
    more_than_mib: int | None = None  # memory that was not enough, if it ran out of GPU memory
    progress: StepProgress | None = None


class Checkpoint(Record, frozen=True, kw_only=True):
    """The state after event `sequence`, which a restart loads instead of the whole log."""

    sequence: int
    at: float
    tasks: tuple[Task, ...]  # unfinished tasks, and the finished tasks that they depend on
    gpus: tuple[Gpu, ...] = ()
    drained: dict[str, str] = {}  # GPU -> reason; "" is the whole server
    last_gpu: GpuId | None = None
    overtaken: dict[int, int] = {}  # task -> number of later tasks that started before it
    idle_w: dict[str, float] = {}  # GPU -> measured idle power
    empty_w: dict[str, float] = {}  # GPU -> idle power by a single reading
    usage: tuple[UserUsage, ...] = ()  # past use by users
    corrections: tuple[Correction, ...] = ()


class Loaded(Record, frozen=True):
    checkpoint: Checkpoint | None
    events: tuple[Durable, ...]  # after the checkpoint, in order
    sequence: int  # of the last event


class Store(Protocol):
    """The log of durable events. `append` returns when they would survive a power cut."""

    def append(self, events: Sequence[Durable]) -> int:
        """Commit all events or none; returns the sequence number of the last. Raises StoreError (full disk, ...).

        The same transaction adds the GPU use of a UseNoted to the hours of the archive.
        """
        ...

    def load(self) -> Loaded: ...

    def save(self, checkpoint: Checkpoint, finished: Sequence[Task]) -> None:
        """Store the checkpoint, move `finished` tasks to the archive, drop the events before it; all or nothing."""
        ...

    def in_place(self) -> bool:
        """Whether the opened file is still the one under its name. If not, the daemon must not start tasks."""
        ...

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec with the environment and command objects of stored tasks where they are equal."""
        ...

    def new_task_ids(self, count: int) -> TaskId:
        """The first of `count` consecutive ids that were never used, not even by a lost submission."""
        ...

    def close(self) -> None: ...


End = tuple[float, TaskId]  # time of the end, and the id: the order of the archive


def end_of(task: Task) -> End:
    assert isinstance(task.status, Finished)
    return task.status.at, task.id


class HistoryQuery(NamedTuple):
    """Finished tasks that a page may contain: `since` is inclusive, `before` exclusive; None: no condition."""

    uid: int | None = None
    since: float | None = None
    kinds: Collection[str] | None = None  # tags of outcomes
    before: End | None = None
    limit: int = 100

    def has(self, task: Task) -> bool:
        """Whether the task is one of them, on this page or a later one."""
        return (
            isinstance(task.status, Finished)
            and (self.uid is None or task.owner.uid == self.uid)
            and (self.since is None or task.status.at >= self.since)
            and (self.kinds is None or tag_of(task.status.outcome) in self.kinds)
            and (self.before is None or end_of(task) < self.before)
        )


class TaskPage(NamedTuple):
    """Finished tasks, newest end first."""

    tasks: Sequence[Task]
    more: bool  # whether older tasks follow


class Archive(Protocol):
    """Finished tasks and past runs, in the file of the Store. Every thread may read; reads do not delay commits."""

    def task(self, task: TaskId) -> Task | None: ...

    def tasks(self, ids: Collection[TaskId]) -> Sequence[Task]:
        """The archived tasks among these ids, in any order, without their environments."""
        ...

    def page(self, query: HistoryQuery = HistoryQuery()) -> TaskPage:
        """Archived tasks, newest end first, without their environments. A page with long commands can be shorter than
        its limit although more tasks follow."""
        ...

    def story(self, task: TaskId) -> Sequence[Durable]:
        """All events of a live or finished task, in order."""
        ...

    def remember(self, run: PastRun) -> None:
        """Idempotent by key."""
        ...

    def usage(self, *, since: float, until: float) -> Sequence[GpuUsage]:
        """The hours that begin within [since, until), oldest first."""
        ...

    def past_runs(
        self, *, uid: int, command: tuple[str, ...], directory: str, near: bool = False, limit: int = 20
    ) -> Sequence[PastRun]:
        """Runs of the same command by the same user in the same directory, newest first. `near`: of all commands that
        differ from this one at most in numbers (carma/command_pattern.py)."""
        ...


class EstimateRequest(Record, frozen=True, kw_only=True):
    """The question to an estimator: the command as it would run, and the GPUs of the server."""

    task: TaskId
    owner: Owner
    spec: TaskSpec
    gpus: tuple[Gpu, ...]
    fingerprint: str = ""  # of the program's files; "" if unknown


class Estimator(Protocol):
    """`quick`: it always answers at once, and is called without waiting for a turn."""

    @property
    def name(self) -> str: ...

    @property
    def quick(self) -> bool: ...

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate: ...
