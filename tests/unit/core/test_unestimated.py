"""Tasks that start before their estimate is there: alone on an idle GPU, which others join once the estimate is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import TaskEstimated, TaskHeld, TaskSubmitted
from carma.core.model.settings import Memory, Rules
from carma.core.model.status import Estimating, Running, Starting
from carma.core.model.values import Demand, Estimate, GpuId, NoEstimate, TaskId, TaskSpec
from carma.testing.builders import ALICE, World

G0 = GpuId("GPU-0")
DEMAND = Demand(sm_active=0.2, sm_occupancy=0.1, dram_active=0.1)
ANSWER = Estimate(footprint_mib=7_000, upper_mib=8_000, source="trace", demand=DEMAND, runtime_s=600.0)


def submit(world: World, **spec: object) -> TaskId:
    """A task whose estimate takes a while."""
    number = TaskId(max(world.state.tasks, default=0) + 1)
    full = TaskSpec(command=("python", "train.py"), directory="/", **spec)  # type: ignore[arg-type]
    world.emit(TaskSubmitted(world.now, number, ALICE, full, False))
    return number


def started(world: World, **spec: object) -> TaskId:
    task = submit(world, **spec)
    world.wait(2)
    world.settle()
    assert world.placed(task)
    return task


def estimated(world: World, task: TaskId, answer: Estimate | None = ANSWER) -> None:
    world.emit(TaskEstimated(world.now, task, answer, () if answer else (NoEstimate(source="trace", reason="no"),)))


def test_a_task_waits_a_moment_for_its_estimate_and_then_starts_on_an_idle_gpu() -> None:
    world = World(1)
    task = submit(world)
    world.settle()
    assert isinstance(world.task(task).status, Estimating)
    world.wait(1)
    world.settle()
    assert isinstance(world.task(task).status, Starting)
    assert world.task(task).attempts[-1].placement.booking.source == "unknown"


def test_a_task_without_an_estimate_does_not_join_others() -> None:
    world = World(1)
    world.run(5_000)
    task = submit(world)
    world.wait(60)
    world.settle()
    assert not world.placed(task)
    assert world.why(task).code == "Estimating"
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.code == "Estimating"


def test_a_gpu_with_a_foreign_process_is_not_idle() -> None:
    world = World(1)
    world.foreign[G0] = 500
    task = submit(world)
    world.wait(5)
    world.settle()
    assert not world.placed(task)


def test_others_join_as_soon_as_the_estimate_is_there() -> None:
    world = World(1)
    first = started(world)
    world.start(first, mib=1_000)
    second = world.submit(5_000)
    world.wait(1)
    world.settle()
    assert world.why(second).code == "WarmUp"
    estimated(world, first)
    world.settle()
    assert world.placed(second)
    booking = world.task(first).attempts[-1].placement.booking
    assert (booking.memory_mib, booking.source) == (8_000, "trace")
    status = world.task(first).status
    assert isinstance(status, Running)
    assert status.placement.booking == booking
    assert world.state.tracks[world.state.active[first]].alone_s == 600.0
    assert world.view(0).holders[0].demand == DEMAND


def test_without_an_answer_others_join_once_the_task_has_settled() -> None:
    world = World(1)
    first = started(world)
    world.start(first)
    estimated(world, first, None)
    second = world.submit(5_000)
    world.settle()
    assert world.why(second).code == "WarmUp"
    world.wait(25)
    world.settle()
    assert world.placed(second)


@pytest.mark.parametrize(("shrink", "mib"), [(False, 40_960 - 20_000), (True, 1_256)])
def test_a_late_estimate_books_no_more_than_others_have_left_and_nothing_after_a_shrink(shrink: bool, mib: int) -> None:
    world = World(1, rules=Rules(memory=Memory(shrink=shrink)))
    first = started(world)
    world.start(first, mib=1_000)
    world.wait(25)
    second = world.submit(20_000)
    world.settle()
    assert world.placed(second), "the first one has settled"
    estimated(world, first, replace(ANSWER, upper_mib=30_000))
    assert world.task(first).attempts[-1].placement.booking.memory_mib == mib


def test_an_estimate_that_comes_after_the_end_is_ignored() -> None:
    world = World(1)
    first = started(world)
    world.start(first)
    world.end(first)
    world.settle()
    before = world.task(first)
    estimated(world, first)
    assert world.task(first) == before


def test_an_estimate_that_comes_between_two_attempts_is_used_by_the_next() -> None:
    world = World(1)
    first = started(world)
    world.start(first)
    world.oom(first, asked_mib=None, peak_mib=None)
    estimated(world, first)
    assert world.task(first).estimate == ANSWER
    assert not world.task(first).awaits_estimate


def test_queued_tasks_go_first_and_a_held_task_does_not_start() -> None:
    world = World(1)
    held = submit(world)
    world.emit(TaskHeld(world.now, held))
    waiting = submit(world)
    world.wait(5)
    queued = world.submit(5_000, exclusive=True)
    world.settle()
    assert (world.placed(held), world.placed(waiting), world.placed(queued)) == (False, False, True)


def test_no_gpu_is_reserved_for_a_task_without_an_estimate() -> None:
    world = World(2)
    world.run(5_000)
    wide = submit(world, gpus=2)
    world.wait(5)
    world.settle()
    assert not world.placed(wide)
    task = world.submit(5_000)
    world.settle()
    assert world.gpus_of(task) == (1,)


@pytest.mark.parametrize(("wait_s", "placed"), [(0.0, True), (60.0, False)])
def test_the_setting_says_how_long_an_estimate_is_awaited(wait_s: float, placed: bool) -> None:
    world = World(1, rules=Rules(memory=Memory(wait_s=wait_s)))
    task = submit(world)
    world.settle()
    assert world.placed(task) is placed
