"""`World`: a server in memory for tests of the core. Each helper is one line of a test: GPUs, tasks, samples, time.

The invariants of the state are checked after each event. Time moves only by `wait`. No clock, file or process is used.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from carma.core.attempt_end import ended
from carma.core.machine import step
from carma.core.model.commands import Command
from carma.core.model.decision import Refusal
from carma.core.model.events import (
    AnyEvent,
    AttemptStarted,
    Durable,
    GpusFound,
    GpusSampled,
    MemorySampled,
    StopRequested,
    TaskEstimated,
    TaskPlaced,
    TaskSubmitted,
)
from carma.core.model.outcome import Cancelled, Outcome, OutOfMemory, Succeeded
from carma.core.model.settings import Rules
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import (
    NO_ACTIVITY,
    Activity,
    AttemptKey,
    Capabilities,
    Estimate,
    Gpu,
    GpuId,
    GpuSample,
    Owner,
    ProcessUse,
    TaskId,
    TaskSpec,
)
from carma.core.policies.magm import POLICY as MAGM
from carma.core.propose import propose
from carma.core.scheduling.eligibility import Waiting
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.snapshot import views
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import State
from carma.testing.invariants import validate

ALL = Capabilities(
    metrics=("sm_active", "sm_occupancy", "dram_active"), power=True, energy=True, processes=True, source="virtual"
)
ALICE = Owner(1001, 1001, "alice")
BOB = Owner(1002, 1002, "bob")


def gpu(index: int, memory_mib: int = 40_960) -> Gpu:
    return Gpu(
        id=GpuId(f"GPU-{index}"),
        index=index,
        name="Test GPU",
        memory_mib=memory_mib,
        kind="virtual",
        capabilities=ALL,
    )


class World:
    """A server with `gpus` GPUs. `log` has all durable events, `commands` all commands to the shell."""

    def __init__(
        self,
        gpus: int | Iterable[int] = 4,
        *,
        rules: Rules | None = None,
        policy: Policy = MAGM,
        memory_mib: int = 40_960,
    ) -> None:
        sizes = [memory_mib] * gpus if isinstance(gpus, int) else list(gpus)
        self.state: State = State(rules or Rules(), policy)
        self.verdicts = VerdictCache()
        self.now = 1_000.0
        self.log: list[Durable] = []
        self.commands: list[Command] = []
        self.memory: dict[AttemptKey, int] = {}  # memory of a running attempt on each of its GPUs
        self.activity: dict[GpuId, tuple[float | None, float | None, float | None]] = {}
        self.foreign: dict[GpuId, int] = {}
        self.faults: dict[GpuId, str] = {}
        self.no_processes: set[GpuId] = set()
        self.counter_j: dict[GpuId, float] = {}  # 50 W idle, 200 W more at full SM activity
        self._counted_at = self.now
        self.emit(GpusFound(self.now, tuple(gpu(index, size) for index, size in enumerate(sizes))))
        self.sample()

    # -- events --------------------------------------------------------------------------------------------------
    def emit(self, event: AnyEvent) -> list[Command]:
        if isinstance(event, Durable):
            self.log.append(event)
        commands = step(self.state, event)
        self.commands.extend(commands)
        broken = validate(self.state)
        assert not broken, broken
        return commands

    def settle(self) -> list[Durable]:
        """Step all proposed events until there are none."""
        done: list[Durable] = []
        for _ in range(10_000):
            due = propose(self.state, self.now, self.verdicts)
            assert due == propose(self.state, self.now), "the cache makes no difference"
            if not due:
                return done
            for event in due:
                self.emit(event)
                done.append(event)
        raise AssertionError("proposals without an end")

    def submit(
        self,
        mib: int | None = None,
        *,
        owner: Owner = ALICE,
        held: bool = False,
        runtime_s: float | None = None,
        source: str = "declared",
        **spec: object,
    ) -> TaskId:
        """One queued task with an estimate of that source; without `mib` it has no estimate."""
        number = TaskId(max(self.state.tasks, default=0) + 1)
        declared = mib if source == "declared" else None
        full = TaskSpec(command=("python", "train.py"), directory="/", gpu_memory_mib=declared, **spec)  # type: ignore[arg-type]
        self.emit(TaskSubmitted(self.now, number, owner, full, held))
        estimate = None
        if mib is not None:
            estimate = Estimate(footprint_mib=mib, upper_mib=mib, source=source, runtime_s=runtime_s)
        self.emit(TaskEstimated(self.now, number, estimate))
        return number

    def start(self, *ids: TaskId, mib: int | None = None) -> None:
        """Starts these tasks (default: all placed ones) and lets them hold memory on their GPUs."""
        for task_id in ids or tuple(self.state.active):
            key = self.state.active[task_id]
            self.emit(AttemptStarted(self.now, key, 10_000 + task_id))
            booked = self.task(task_id).attempts[-1].placement.booking.memory_mib
            self.memory[key] = booked if mib is None else mib

    def end(self, task_id: TaskId, outcome: Outcome | None = None) -> None:
        key = self.state.active[task_id]
        event = ended(self.state, key, outcome or Succeeded(), self.now)
        self.memory.pop(key, None)
        self.emit(event)

    def oom(self, task_id: TaskId, *, asked_mib: int | None = 2_048, peak_mib: int | None = None) -> None:
        self.end(task_id, OutOfMemory("gpu", 1, asked_mib, peak_mib, "CUDA out of memory"))

    def run(self, mib: int | None = None, *, holds_mib: int | None = None, **spec: object) -> TaskId:
        """One task that is placed, runs, and has settled on its GPUs."""
        number = self.submit(mib, **spec)  # type: ignore[arg-type]
        self.settle()
        assert self.placed(number), self.why(number)
        self.start(number, mib=holds_mib)
        self.wait(self.state.rules.warmup.settle_s + 2)
        self.settle()  # peaks
        return number

    def stop(self, task_id: TaskId, by: str = "alice") -> list[Command]:
        return self.emit(StopRequested(self.now, task_id, Cancelled(by), 5.0))

    # -- time and samples -----------------------------------------------------------------------------------------
    def wait(self, seconds: float, every_s: float = 1.0) -> None:
        """Time passes, with a sample every `every_s` seconds. Nothing is proposed."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + every_s)
            self.sample()

    def sample(self) -> None:
        samples = tuple(self._sample(found) for found in self.state.gpus.values())
        self._counted_at = self.now
        self.emit(GpusSampled(self.now, samples))

    def sample_memory(self) -> None:
        """A memory sample, as the daemon takes between two full samples."""
        samples = [self._sample(found) for found in self.state.gpus.values()]
        self._counted_at = self.now
        memory = (replace(one, activity=NO_ACTIVITY, power_w=None, energy_j=None) for one in samples)
        self.emit(MemorySampled(self.now, tuple(memory)))

    def _sample(self, found: Gpu) -> GpuSample:
        if found.id in self.faults:
            return GpuSample(gpu=found.id, at=self.now, fault=self.faults[found.id])
        uses = [
            ProcessUse(pid=10_000 + key.task, memory_mib=self.memory[key], attempt=key)
            for key in self.state.on_gpu.get(found.id, {})
            if key in self.memory
        ]
        if found.id in self.foreign:
            uses.append(ProcessUse(pid=77, memory_mib=self.foreign[found.id], name="jupyter"))
        sm, occupancy, dram = self.activity.get(found.id, (0.3, 0.1, 0.1) if uses else (0.0, 0.0, 0.0))
        power_w = 50.0 + 200.0 * (sm or 0.0)
        self.counter_j[found.id] = self.counter_j.get(found.id, 0.0) + power_w * (self.now - self._counted_at)
        return GpuSample(
            gpu=found.id,
            at=self.now,
            memory_used_mib=sum(use.memory_mib or 0 for use in uses),
            activity=Activity(sm_active=sm, sm_occupancy=occupancy, dram_active=dram),
            power_w=power_w,
            energy_j=self.counter_j[found.id],
            processes=None if found.id in self.no_processes else tuple(uses),
        )

    # -- looking ----------------------------------------------------------------------------------------------------
    def task(self, task_id: TaskId) -> Task:
        return self.state.tasks[task_id]

    def gpus_of(self, task_id: TaskId) -> tuple[int, ...]:
        """Indices of the GPUs of its newest attempt; empty if there was none."""
        attempts = self.task(task_id).attempts
        return tuple(self.state.gpus[gpu].index for gpu in attempts[-1].placement.gpus) if attempts else ()

    def view(self, index: int) -> GpuView:
        return views(self.state, self.now)[index]

    def why(self, task_id: TaskId) -> Waiting:
        """Why it waits."""
        return waiting(self.state, self.now, [task_id])[task_id]

    def refusal(self, task_id: TaskId, index: int) -> Refusal | None:
        """The refusal of one GPU, if any."""
        return explain(self.state, task_id, self.now).verdicts[index].refusal

    def outcome(self, task_id: TaskId) -> Outcome | None:
        status = self.task(task_id).status
        return status.outcome if isinstance(status, Finished) else None

    def placed(self, task_id: TaskId) -> bool:
        return task_id in self.state.active

    def placements(self) -> list[tuple[TaskId, tuple[int, ...]]]:
        return [
            (event.key.task, tuple(self.state.gpus[gpu].index for gpu in event.placement.gpus))
            for event in self.log
            if isinstance(event, TaskPlaced)
        ]
