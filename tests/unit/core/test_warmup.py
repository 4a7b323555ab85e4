"""Warm-up: what a task that has not settled books, when it closes its GPU, and when it has settled."""

from __future__ import annotations

from typing import Literal

import pytest

from carma.core.model.events import AttemptStarted, GpuDrained, TaskEstimated, TaskSubmitted
from carma.core.model.settings import Gate, Rules, Sharing, WarmUp
from carma.core.model.values import AttemptKey, Confinement, Demand, Estimate, GpuId, Guard, TaskId, TaskSpec
from carma.testing.builders import ALICE, World

G0 = GpuId("GPU-0")


def newcomer(rules: Rules | None = None) -> tuple[World, AttemptKey]:
    world = World(1, rules=rules)
    task = world.submit(5_000)
    world.settle()
    return world, world.state.active[task]


def closed(world: World) -> str | None:
    """The phrase with which the GPU is closed to everybody, for its newcomer's sake."""
    return world.view(0).holders[0].warming


def test_a_gpu_opens_when_the_new_task_has_settled_not_after_a_fixed_time() -> None:
    world, key = newcomer()
    assert closed(world) == "was sent there 0 s ago and has not started yet"
    world.start(key.task, mib=1_000)
    world.wait(10)
    assert closed(world) is not None
    for _ in range(30):  # it grows for a minute: no fixed wait would have been right
        world.memory[key] += 100
        world.wait(2)
        assert "its memory grew" in str(closed(world))
    world.wait(18)
    assert closed(world) is not None
    world.wait(1)
    assert closed(world) is None


def test_growth_below_the_threshold_counts_as_none() -> None:
    world, key = newcomer()
    world.start(key.task, mib=1_000)
    for _ in range(25):
        world.memory[key] += 2
        world.wait(1)
    assert closed(world) is None


def test_activity_that_still_changes_keeps_the_gpu_closed() -> None:
    world, key = newcomer()
    world.activity[G0] = (0.1, 0.1, 0.1)
    world.start(key.task)
    world.wait(12)
    world.activity[G0] = (0.7, 0.1, 0.1)
    world.wait(9)
    assert closed(world) == "is warming up: its activity still changes"
    world.wait(20)
    assert closed(world) is None


def test_an_idle_new_task_stops_closing_the_gpu_after_idle_s() -> None:
    world, key = newcomer()
    world.start(key.task)
    del world.memory[key]
    world.wait(119)
    assert (
        closed(world)
        == "started 01:59 ago and has not used the GPU yet; if it does not, the GPU opens to others in 1 s"
    )
    world.wait(1)
    assert closed(world) is None


def test_a_process_that_holds_no_memory_has_not_used_the_gpu() -> None:
    world, key = newcomer()
    world.start(key.task, mib=0)
    world.wait(60)
    assert "has not used the GPU yet" in str(closed(world))


def test_a_new_task_that_never_settles_stops_closing_the_gpu_after_limit_s() -> None:
    world, key = newcomer()
    world.start(key.task, mib=100)
    world.wait(2)
    while world.now < 1_000 + 598:
        world.memory[key] += 65
        world.wait(2)
    assert closed(world) is not None
    world.wait(2)
    assert closed(world) is None


def test_warm_up_counts_from_first_activity_and_not_from_the_launch() -> None:
    world, key = newcomer()
    world.start(key.task)
    held = world.memory.pop(key)
    world.wait(55)  # importing frameworks
    world.memory[key] = held
    world.wait(20)
    assert closed(world) is not None
    world.wait(1)
    assert closed(world) is None


def test_problem_13_samples_before_the_first_activity_of_a_new_task_do_not_count() -> None:
    world, key = newcomer()
    world.activity[G0] = (0.0, 0.0, 0.0)
    world.start(key.task)
    held = world.memory.pop(key)
    world.wait(25)
    world.memory[key] = held
    world.activity[G0] = (0.95, 0.1, 0.1)
    world.wait(3)
    summary = world.view(0).summaries["sm_active"]
    assert (summary.count, summary.mean) == pytest.approx((3, 0.95)), "the idle seconds before do not water it down"


def test_the_first_sample_that_shows_a_new_task_counts_also_with_a_real_clock() -> None:
    """Seconds since the epoch have no room for a nanosecond in a float."""
    world = World(1)
    world.now = 1_790_000_000.0
    world.sample()
    task = world.submit(5_000)
    world.settle()
    world.start(task)
    world.wait(3)
    assert world.view(0).summaries["sm_active"].count == 3


def test_warm_up_can_be_switched_off() -> None:
    rules = Rules(warmup=WarmUp(enabled=False), gate=Gate(enabled=False))
    world = World(1, rules=rules)
    tasks = [world.submit(5_000) for _ in range(3)]
    world.settle()
    assert all(world.placed(task) for task in tasks)


def test_without_warm_up_the_gate_still_needs_samples_of_the_new_task() -> None:
    world = World(1, rules=Rules(warmup=WarmUp(enabled=False)))
    world.wait(30)
    first, second = world.submit(5_000), world.submit(5_000)
    world.settle()
    assert world.placed(first)
    assert not world.placed(second), "the quiet window is of the time before the first came"
    world.start(first)
    world.wait(3)
    world.settle()
    assert world.placed(second)


# Which tasks close their GPU, and what the others book.


def confined(*rungs: Literal["framework", "mps", "cgroup", "watchdog"]) -> Confinement:
    return Confinement(mechanism="mps", guards=tuple(Guard(rung=rung, limit_mib=5_000) for rung in rungs))


def second_task(world: World, mib: int | None = 5_000) -> str:
    """The code with which another task waits; empty if it is placed."""
    task = world.submit(mib)
    world.settle()
    return "" if world.placed(task) else world.why(task).code


def test_tasks_of_known_size_are_placed_in_one_pass() -> None:
    world = World(1)
    tasks = [world.submit(5_000) for _ in range(3)]
    world.settle()
    assert [world.placed(task) for task in tasks] == [True, True, False]
    why = world.why(tasks[2])
    assert why.code == "WarmUp"
    assert "until then its tasks book sm_active 0.84 (cap 0.80)" in why.sentence


def test_a_known_demand_is_booked_instead_of_the_usual_one() -> None:
    world = World(1)
    for _ in range(4):
        number = TaskId(max(world.state.tasks, default=0) + 1)
        world.emit(TaskSubmitted(world.now, number, ALICE, TaskSpec(command=("a",), directory="/"), False))
        demand = Demand(sm_active=0.1, sm_occupancy=0.05, dram_active=0.05)
        estimate = Estimate(footprint_mib=5_000, upper_mib=5_000, source="history", demand=demand)
        world.emit(TaskEstimated(world.now, number, estimate))
    world.settle()
    assert len(world.state.active) == 4, "as many as one GPU takes"


@pytest.mark.parametrize("mib", [None, 5_000])
def test_a_task_closes_its_gpu_unless_its_memory_is_known(mib: int | None) -> None:
    world = World(1)
    world.submit(mib)
    world.settle()
    assert second_task(world) == ("WarmUp" if mib is None else "")


def test_without_memory_limits_every_new_task_closes_its_gpu() -> None:
    world = World(1, rules=Rules(sharing=Sharing(caps=False)))
    world.submit(5_000)
    world.settle()
    assert second_task(world) == "WarmUp"


@pytest.mark.parametrize(("rung", "code"), [("mps", ""), ("cgroup", ""), ("framework", ""), ("watchdog", "WarmUp")])
def test_a_task_that_got_no_limit_at_its_start_closes_its_gpu(
    rung: Literal["framework", "mps", "cgroup", "watchdog"], code: str
) -> None:
    world = World(1)
    first = world.submit(5_000)
    world.settle()
    world.emit(AttemptStarted(world.now, world.state.active[first], 7, confined(rung)))
    assert second_task(world) == code


def test_a_task_that_ran_out_of_memory_closes_its_gpu_at_the_next_attempt() -> None:
    world = World(2)
    first = world.submit(5_000)
    world.settle()
    world.start(first)
    world.oom(first)
    world.settle()
    world.wait(5)
    world.settle()
    assert world.placed(first)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), ""))
    assert second_task(world) == "WarmUp"


def test_a_gpu_that_gives_no_sm_activity_is_not_opened_by_what_its_tasks_book() -> None:
    world = World(1)
    world.activity[G0] = (None, 0.1, 0.1)
    world.wait(1)
    world.submit(5_000)
    world.settle()
    assert second_task(world) == "Metrics"


def test_foreign_processes_book_nothing_so_that_the_window_decides() -> None:
    world = World(1)
    world.foreign[G0] = 1_000
    world.activity[G0] = (0.9, 0.1, 0.1)
    world.wait(30)
    assert second_task(world) == "Utilisation"
    world.activity[G0] = (0.2, 0.1, 0.1)
    world.wait(60)
    world.settle()
    assert second_task(world) == "Metrics", "the window is of the time before the task came"


def test_an_unsettled_task_books_activity_beside_those_that_have_settled() -> None:
    world = World(1)
    world.activity[G0] = (0.7, 0.1, 0.1)
    world.run(5_000)
    world.wait(30)
    assert second_task(world) == ""
    assert second_task(world) == "WarmUp", "0.70 observed, and 0.73 booked for the second"
