"""A world of tasks that run, and what was seen of them, for tests of their pace."""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.events import TaskEstimated, TaskSubmitted
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import Activity, Demand, Estimate, GpuId, GpuSample, Owner, TaskId, TaskSpec
from carma.core.policies import first_fit
from carma.core.telemetry.measurements import AttemptOnGpu, Member, Track
from carma.core.telemetry.pace import belief
from carma.testing.builders import ALICE, World

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))
GPU0, GPU1 = GpuId("GPU-0"), GpuId("GPU-1")
HALF = Demand(0.5, 0.25, 0.2, 0.6, 0.4)
FULL = Demand(0.9, 0.4, 0.4, 1.0, 0.8)


AT_ONCE_S = 1e-6  # a sample must be newer than the one before it


def world(gpus: int = 1, rules: Rules = OPEN) -> World:
    return World(gpus, rules=rules, policy=first_fit.POLICY)


def begin(
    made: World,
    demand: Demand | None = None,
    runtime_s: float | None = None,
    gpus: int = 1,
    *,
    predicted: bool = False,
    command: str = "x",
    owner: Owner = ALICE,
) -> TaskId:
    """One that is placed now, runs, and is seen on its GPUs."""
    number = TaskId(max(made.state.tasks, default=0) + 1)
    spec = TaskSpec(command=(command,), directory="/", gpu_memory_mib=1_000, gpus=gpus)
    estimate = Estimate(footprint_mib=1_000, upper_mib=1_000, source="declared", demand=demand, runtime_s=runtime_s)
    estimate = replace(estimate, demand_predicted=predicted)
    made.emit(TaskSubmitted(made.now, number, owner, spec))
    made.emit(TaskEstimated(made.now, number, estimate))
    made.settle()
    made.start(number)
    made.now += AT_ONCE_S
    made.sample()
    return number


def track_of(made: World, task: TaskId) -> Track:
    return made.state.tracks[made.state.active[task]]


def seen_of(made: World, task: TaskId, gpu: GpuId = GPU0) -> AttemptOnGpu:
    return track_of(made, task).on[gpu]


def believed(made: World, task: TaskId) -> Demand | None:
    return belief(made.task(task), seen_of(made, task))


def members(made: World, *tasks: TaskId) -> list[Member]:
    return [Member(made.state.active[task], track_of(made, task), seen_of(made, task)) for task in tasks]


def shows(at: float, active: float | None, gr_active: float | None = None) -> GpuSample:
    part = active or 0.0
    activity = Activity(sm_active=active, sm_occupancy=part / 2, dram_active=part / 4, gr_active=gr_active)
    return GpuSample(gpu=GPU0, at=at, activity=activity)
