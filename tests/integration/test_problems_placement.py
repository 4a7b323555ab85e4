"""Problems 10 to 18 of the published system: wrong placements. Decisions are pure, so most of this needs no process.

Each test is named after its problem; its first line says what happened there, the rest what happens here.
"""

from __future__ import annotations

import math
import os

import pytest

from carma import procfs
from carma.core.model.decision import Decision
from carma.core.model.events import GpusSampled, TaskEstimated, TaskSubmitted
from carma.core.model.settings import Gate, Rules, WarmUp, WindowRules
from carma.core.model.values import Activity, AttemptKey, Estimate, GpuId, GpuSample, ProcessUse, TaskId, TaskSpec
from carma.core.policies.exclusive import POLICY as EXCLUSIVE
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.snapshot import views
from carma.monitor.processes import attribute
from carma.testing.builders import ALICE, World
from tests.harness import serving

GPU = GpuId("GPU-0")
OPEN = Rules(warmup=WarmUp(enabled=False))  # no warm-up: no task waits until a started task has settled
SETTLED_S = 25.0  # longer than warmup.settle_s


def refusal(world: World, task: TaskId, index: int = 0) -> str:
    """The code with which that GPU is refused; empty when it could take the task."""
    decision: Decision = explain(world.state, task, world.now)
    verdict = next(v for v in decision.verdicts if v.gpu == GpuId(f"GPU-{index}"))
    return verdict.refusal.code if verdict.refusal is not None else ""


def running(world: World, mib: int, *, holds: int | None = None, runtime_s: float | None = None) -> TaskId:
    """A task that was placed and has started; it holds its booking unless told otherwise."""
    task = world.submit(mib, runtime_s=runtime_s)
    world.settle()
    assert world.placed(task)
    world.start(task, mib=holds)
    world.sample()
    return task


def estimated(world: World, mib: int, source: str) -> TaskId:
    """A task whose memory an estimator gave, not its user."""
    number = TaskId(max(world.state.tasks, default=0) + 1)
    spec = TaskSpec(command=("python", "train.py"), directory="/")
    world.emit(TaskSubmitted(world.now, number, ALICE, spec))
    world.emit(TaskEstimated(world.now, number, Estimate(footprint_mib=mib, upper_mib=mib, source=source)))
    return number


def test_problem_10_memory_that_a_task_may_still_take_is_booked() -> None:
    """Only the free memory of the moment counted, so a job that still grew met a neighbour, and either ran out.

    Here the booking counts as long as the task runs, however little it holds; one that outgrows it counts with its
    peak.
    """
    world = World(1)
    first = running(world, 24_000, holds=1_000)
    world.wait(SETTLED_S)
    second = world.submit(20_000)
    world.settle()
    assert not world.placed(second)
    assert refusal(world, second) == "Memory"
    assert running(world, 12_000) in world.state.active
    world.wait(SETTLED_S)

    world.memory[world.state.active[first]] = 27_500  # over its booking
    world.wait(3)
    world.memory[world.state.active[first]] = 24_000  # for a moment; it may go there again
    world.wait(SETTLED_S)
    third = world.submit(4_000)
    world.settle()
    assert not world.placed(third), "24,000 and 12,000 leave 4,960 by bookings, and less by what was seen"
    assert refusal(world, third) == "Memory"


@pytest.mark.parametrize("sm", [None, math.nan])
def test_problem_11_what_is_not_known_does_not_pass_the_gate(sm: float | None) -> None:
    """Values that DCGM did not give, or gave as not-a-number, passed the gate; old ones were used for ever.

    Here a metric that is missing, or that is older than a few periods, closes the GPU to a second task.
    """
    world = World(1, rules=OPEN)
    running(world, 4_000)
    world.activity[GPU] = (sm, 0.1, 0.1)
    world.wait(10)
    second = world.submit(4_000)
    world.settle()
    assert not world.placed(second)
    assert refusal(world, second) == "Metrics"

    world.activity[GPU] = (0.3, 0.1, 0.1)
    world.wait(40)
    world.now += OPEN.window.stale_s + 1  # the monitor has died
    world.settle()
    assert not world.placed(second)
    assert refusal(world, second) == "Metrics"

    world.sample()  # and is back
    world.wait(10)
    world.settle()
    assert world.placed(second)


@pytest.mark.parametrize("listed", ["not given", "empty"])
def test_problem_11_a_process_list_that_tells_nothing_does_not_make_a_gpu_idle(listed: str) -> None:
    """An empty process list meant "all idle": a GPU that others kept busy was handed out as if it were free.

    CARMA counts memory that belongs to no listed process as used: the GPU is not idle, and the gate checks it.
    """
    world = World(1, rules=OPEN)
    for _ in range(10):
        world.now += 1
        processes = () if listed == "empty" else None
        busy = GpuSample(
            gpu=GPU,
            at=world.now,
            memory_used_mib=20_000,
            activity=Activity(sm_active=0.97, sm_occupancy=0.6, dram_active=0.7),
            processes=processes,
        )
        world.emit(GpusSampled(world.now, (busy,)))
    task = world.submit(4_000)
    world.settle()
    assert not world.placed(task)
    assert refusal(world, task) == "Utilisation"


def test_problem_12_each_metric_closes_the_gate_by_itself_and_tasks_per_gpu_are_limited() -> None:
    """A GPU at 100 % SM activity passed with occupancy .44 and DRAM .39, or at DRAM .95 with SM .79; no limit on jobs.

    Here one cap that is reached closes the GPU, and so does the number of tasks on it.
    """
    assert OPEN.gate == Gate(), "the defaults are what is judged here"
    for activity in ((1.0, 0.44, 0.39), (0.79, 0.2, 0.95), (0.5, 0.5, 0.1)):
        world = World(1, rules=OPEN)
        running(world, 2_000)
        world.activity[GPU] = activity
        world.wait(40)
        second = world.submit(2_000)
        world.settle()
        assert not world.placed(second), activity
        assert refusal(world, second) == "Utilisation"

    world = World(1, rules=OPEN)
    limit = OPEN.placement.tasks_per_gpu
    for _ in range(limit):
        running(world, 100)
        world.activity[GPU] = (0.1, 0.05, 0.05)
        world.wait(10)
    one_more = world.submit(100)
    world.settle()
    assert not world.placed(one_more)
    assert refusal(world, one_more) == "TasksPerGpu"


def test_problem_13_a_task_is_not_judged_by_its_start_up_phase() -> None:
    """Under load the decision used the first 30 s of the last started task: imports and data loading, not training.

    CARMA keeps the GPU closed until the task has used it and settled, and only later samples count.
    """
    rules = Rules(gate=Gate(summary="mean"), window=WindowRules(length_s=30.0))
    world = World(1, rules=rules)
    first = world.submit()
    world.settle()
    world.start(first)
    key = world.state.active[first]
    held = world.memory.pop(key)  # it starts up: no memory, nothing to see
    world.activity[GPU] = (0.02, 0.01, 0.01)
    world.wait(40)
    second = world.submit(8_000)
    world.settle()
    assert refusal(world, second) == "WarmUp"

    world.memory[key] = held  # training begins
    world.activity[GPU] = (0.95, 0.4, 0.3)
    world.wait(10)
    world.settle()
    assert refusal(world, second) == "WarmUp"
    world.wait(rules.warmup.settle_s - 9)
    world.settle()
    assert not world.placed(second), "a third of the window is still start-up"
    assert refusal(world, second) == "Utilisation"


def test_problem_14_a_pid_is_a_number_and_not_a_piece_of_text() -> None:
    """Whether a process lived was a search in text: 123 "lived" as long as 12345 did, and its GPU stayed closed.

    Here pids are compared whole, and with their start time: the same number later is another process.
    """
    key = AttemptKey(TaskId(1), 1)
    uses = tuple(ProcessUse(pid=pid, memory_mib=100) for pid in (123, 12345, 1234, 23))
    (sample,) = attribute([GpuSample(gpu=GPU, at=0.0, memory_used_mib=400, processes=uses)], {123: key})
    assert [use.attempt for use in sample.processes or ()] == [key, None, None, None]

    me = procfs.process(os.getpid())
    assert me is not None
    assert procfs.alive(me.pid, me.start_ticks)
    assert not procfs.alive(me.pid, me.start_ticks - 1), "an earlier owner of this pid"

    world = World(1, policy=EXCLUSIVE)
    first = running(world, 8_000)
    second = world.submit(8_000)
    world.end(first)
    world.foreign[GPU] = 500  # another process, with another pid, is still there
    world.wait(5)
    world.settle()
    assert world.placed(second)


def test_problem_15_pids_of_another_namespace_do_not_close_a_gpu_for_ever() -> None:
    """In containers the driver's pids are not the launcher's, so a job was never seen and its GPU never reopened.

    Here such processes are foreign: counted and shown. The GPU opens again after a while, with what is left of it.
    """
    world = World(1)
    first = world.submit()
    world.settle()
    world.start(first)
    del world.memory[world.state.active[first]]
    world.foreign[GPU] = 6_000  # its own memory, under a pid that CARMA cannot see
    second = world.submit(20_000)
    world.wait(30)
    world.settle()
    assert refusal(world, second) == "WarmUp"
    world.wait(world.state.rules.warmup.idle_s)
    world.settle()
    assert world.placed(second)
    third = world.submit(10_000)
    world.start(second)
    world.wait(SETTLED_S)
    world.settle()
    (view,) = views(world.state, world.now)
    assert ([use.pid for use in view.foreign], view.foreign_mib) == ([77], 6_000)
    assert refusal(world, third) == "Memory", "5,120 and 20,000 are booked and 6,000 are foreign"
    world.end(second)
    world.end(first)
    world.foreign.clear()
    world.wait(5)
    world.settle()
    assert world.placed(third)


def test_problem_16_a_large_task_or_a_recovering_one_does_not_hold_up_the_others() -> None:
    """Strict FIFO: a two-GPU task, or one back from an OOM, kept all others from sharing until enough GPUs were empty.

    Here smaller tasks go before it where they do not delay it; its own start is kept and shown.
    """
    world = World(2, rules=OPEN)
    first = running(world, 30_000, runtime_s=600.0)
    big = world.submit(30_000, gpus=2)
    small = world.submit(4_000, runtime_s=60.0)
    world.wait(5)
    world.settle()
    assert not world.placed(big)
    assert world.placed(small)
    why = waiting(world.state, world.now)[big]
    assert why.reserved_start_at is not None
    assert why.reserved_start_at <= world.now + 600.0
    world.start(small)

    world.oom(first)  # returns with a larger booking; no task waits for it
    world.settle()
    assert not world.placed(first)
    another = world.submit(2_000, runtime_s=30.0)
    world.wait(1)
    world.settle()
    assert world.placed(another)
    for task in (small, another):
        world.end(task)
    world.wait(60)
    world.settle()
    world.start()
    assert world.placed(big) or world.placed(first), "the first task in the queue is not starved"


def test_problem_17_a_large_estimate_can_share_a_card_and_one_above_the_card_still_runs() -> None:
    """An answer of 32 to 40 GB was stored as 40,000; with 2,048 on top it was above the card: alone, or never.

    Here a figure is what was estimated, the margin is asked of shared GPUs only, and a guess above every card gets
    the largest card for itself.
    """
    world = World(1, rules=OPEN)
    running(world, 2_000)
    world.wait(40)
    large = estimated(world, 36_000, "gpumemnet")
    world.settle()
    assert world.placed(large), "36,000 and 2,000 and the margin are less than 40,960"
    booking = world.task(large).attempts[-1].placement.booking
    assert (booking.memory_mib, booking.source, booking.alone) == (36_000, "gpumemnet", False)

    world = World(1, rules=OPEN)
    whole = estimated(world, 40_000, "gpumemnet")
    world.settle()
    assert world.placed(whole)

    world = World(1, rules=OPEN)
    above = estimated(world, 48_000, "gpumemnet")
    world.settle()
    assert world.placed(above)
    assert world.task(above).attempts[-1].placement.booking.alone


def test_problem_18_a_figure_is_only_used_where_it_was_asked_for() -> None:
    """With no estimator set, the estimating policies used the measured ("oracle") figure without a word.

    In CARMA `memory.sources` lists the estimators. Without any the size is unknown; every booking names its source.
    """
    with serving(gpus=1, memory__sources="") as nobody_asked:
        view = nobody_asked.wait(nobody_asked.submit("true", gpu_memory_mib=1_000))
        assert view.estimate is None
        unknown = next(s.value for s in nobody_asked.client.settings() if s.name == "memory.unknown_mib")
        booked = view.attempts[0]
        assert (booked.booking_mib, booked.booking_source) == (unknown, "unknown")
    with serving(gpus=1, memory__sources="declared") as declared:
        view = declared.wait(declared.submit("true", gpu_memory_mib=1_000))
        assert view.estimate is not None
        assert view.estimate.source == "declared"
        assert (view.attempts[0].booking_mib, view.attempts[0].booking_source) == (1_000, "declared")
