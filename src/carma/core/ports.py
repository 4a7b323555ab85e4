"""The seams. Real GPUs, virtual GPUs and the simulator differ only behind these; each has one contract suite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from carma.core.model.events import Durable
from carma.core.model.outcome import Outcome
from carma.core.model.task import Task
from carma.core.model.values import (
    Activity,
    Alone,
    AttemptKey,
    Confinement,
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
    TaskId,
    TaskSpec,
)
from carma.core.scheduling.fairness import UserUsage


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch; never goes back, whatever the machine's clock does."""
        ...


class Sampler(Protocol):
    """Reads the GPUs. Never raises: a GPU that does not answer gives a sample with a `fault`."""

    def gpus(self) -> tuple[Gpu, ...]: ...

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        """One sample for each GPU of `gpus()`; processes are not attributed yet (`attempt` is None)."""
        ...

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """Memory and processes of those GPUs only: cheap enough for several times a second."""
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
    preempted: bool = False  # an earlier attempt was asked to save: there may be something to go on from
    frameworks: Frameworks | None = None  # what the command would import; None: the launcher reads the files itself


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
    """What the launcher knows of an attempt.

    `pid` None, `outcome` None and not `claimed`: the order was never carried out (it may be given again).
    """

    key: AttemptKey
    pid: int | None = None
    started_at: float | None = None
    claimed: bool = False  # a runner has the order and starts the command
    outcome: Outcome | None = None  # set when it has ended
    ended_at: float | None = None
    confinement: Confinement | None = None  # of one that has started
    trouble: str | None = None  # it lives, but what it runs under is gone: a sentence
    checkpoint_asked_at: float | None = (
        None  # of one that has ended: the last request to save that it was told of, by `asked_at`
    )


class Launcher(Protocol):
    """Starts attempts that outlive the daemon, and tells how they ended."""

    def launch(self, order: LaunchOrder) -> None:
        """Start it. The same key twice starts one process. Raises nothing: a failure to start is an outcome."""
        ...

    def poll(self, keys: Iterable[AttemptKey]) -> tuple[AttemptReport, ...]:
        """How those attempts stand now, one entry for each key."""
        ...

    def signal(self, key: AttemptKey, signal: int, *, whole_tree: bool = True) -> None:
        """Send a signal to the attempt's processes; nothing happens if they are gone."""
        ...

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        """Send a signal to those of its processes that listen for it, and to nobody whom it would end; once for each
        `asked_at`. Whether anybody was told, now or before: else it may be tried again."""
        ...

    def pids(self, keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        """The living processes of those attempts, descendants included."""
        ...

    def sharing_pids(self) -> frozenset[int]:
        """Processes through which attempts share GPUs and which belong to no attempt (MPS servers)."""
        ...

    def has_order(self, key: AttemptKey) -> bool:
        """Whether an order for this attempt ever arrived, also under an earlier daemon. Callable from any thread."""
        ...

    def release(self, key: AttemptKey) -> None:
        """The attempt's end is in the store: drop what was kept to tell it. Its logs stay."""
        ...


class PastRun(Record, frozen=True, kw_only=True):
    """A finished attempt as history remembers it; what `history` estimates from."""

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
    fingerprint: str = ""  # of what it ran, but for the numbers among its words; "" where nobody looked
    more_than_mib: int | None = None  # of one that ran out of GPU memory: so much was not enough


class Checkpoint(Record, frozen=True, kw_only=True):
    """The state as of event `sequence`: what a restart needs instead of the whole log."""

    sequence: int
    at: float
    tasks: tuple[Task, ...]  # all that are not finished, and the finished ones that these wait for
    gpus: tuple[Gpu, ...] = ()
    drained: dict[str, str] = {}  # GPU -> reason; "" stands for the whole server
    last_gpu: GpuId | None = None
    overtaken: dict[int, int] = {}  # task -> how many later ones went before it
    idle_w: dict[str, float] = {}  # GPU -> what it takes with nobody on it, as seen so far
    empty_w: dict[str, float] = {}  # the same of others, by a single reading
    usage: tuple[UserUsage, ...] = ()  # what users had


class Loaded(Record, frozen=True):
    checkpoint: Checkpoint | None
    events: tuple[Durable, ...]  # after the checkpoint, in order
    sequence: int  # of the last event there is


class Store(Protocol):
    """The log of durable events. `append` returns when they would survive a power cut."""

    def append(self, events: Sequence[Durable]) -> int:
        """Commit all of them or none; returns the sequence number of the last. Raises StoreError (full disk, ...).

        What a UseNoted tells of GPUs is added to the Archive's hours in the same moment.
        """
        ...

    def load(self) -> Loaded: ...

    def save(self, checkpoint: Checkpoint, finished: Sequence[Task]) -> None:
        """Keep the checkpoint, move `finished` tasks to the archive, drop the events before it; all or nothing."""
        ...

    def in_place(self) -> bool:
        """Whether what was opened is still what others find under its name. If not, nothing may be started."""
        ...

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec with the environment and command objects of stored tasks, if they are equal."""
        ...

    def new_task_ids(self, count: int) -> TaskId:
        """The first of `count` consecutive ids that were never given before, not even by a lost submission."""
        ...

    def close(self) -> None: ...


End = tuple[float, TaskId]  # when a task ended, and its id: the order of the archive


class TaskPage(NamedTuple):
    """Finished tasks, newest end first."""

    tasks: Sequence[Task]
    more: bool  # whether older ones follow


class Archive(Protocol):
    """Finished tasks and past runs, in the same file as the Store. Any thread may read; reads do not delay commits."""

    def task(self, task: TaskId) -> Task | None: ...

    def tasks(self, ids: Collection[TaskId]) -> Sequence[Task]:
        """Those of these tasks that are archived, in any order, without their environments."""
        ...

    def page(
        self,
        *,
        uid: int | None = None,
        since: float | None = None,
        kinds: Collection[str] | None = None,
        before: End | None = None,
        limit: int = 100,
    ) -> TaskPage:
        """Archived tasks, newest end first, without their environments.

        `since` includes that moment, `before` excludes that end, `kinds` are tags of outcomes. A page can be shorter
        than `limit` although more follow: long commands count.
        """
        ...

    def story(self, task: TaskId) -> Sequence[Durable]:
        """All that happened to a task, in order, whether it is live or finished."""
        ...

    def remember(self, run: PastRun) -> None:
        """Idempotent by key."""
        ...

    def usage(self, *, since: float, until: float) -> Sequence[GpuUsage]:
        """The hours that begin within that span, oldest first."""
        ...

    def past_runs(self, *, uid: int, command: tuple[str, ...], directory: str, limit: int = 20) -> Sequence[PastRun]:
        """Runs of the same command by the same user in the same directory, newest first."""
        ...

    def near_runs(self, *, uid: int, command: tuple[str, ...], directory: str, limit: int = 200) -> Sequence[PastRun]:
        """As `past_runs`, of all commands that differ from it only in numbers (core/model/command_pattern.py), itself
        included."""
        ...


class EstimateRequest(Record, frozen=True, kw_only=True):
    """The question to an estimator: the command as it would run, and the GPU it would run on."""

    task: TaskId
    owner: Owner
    spec: TaskSpec
    gpus: tuple[Gpu, ...]  # the server's
    fingerprint: str = ""  # of what the command would run, but for the numbers among its words; "": nobody looked


class Estimator(Protocol):
    name: str

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate: ...
