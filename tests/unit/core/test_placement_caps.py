"""Where a task is to be stopped, and what MIG instances take."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import GpusFound
from carma.core.model.settings import Gate, Rules, Sharing, WarmUp
from carma.core.model.values import GpuId, TaskId, TaskSpec
from carma.testing.builders import World, gpu

G0 = GpuId("GPU-0")
Activity = tuple[float | None, float | None, float | None]

# Where a task is to be stopped.

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))


def cap(world: World, task: TaskId) -> int | None:
    world.settle()
    return world.task(task).attempts[-1].placement.booking.cap_mib


@pytest.mark.parametrize("source", ["declared", "history"])
def test_a_task_of_known_size_is_held_to_its_booking(source: str) -> None:
    world = World(1, rules=OPEN)
    assert cap(world, world.submit(5_000, source=source)) == 5_000


def test_a_task_of_unknown_size_is_held_to_what_was_free_when_it_came() -> None:
    world = World(1, rules=OPEN)
    known = world.submit(10_000)
    world.settle()
    world.start(known, mib=4_000)
    world.foreign[G0] = 3_000
    world.wait(1)
    assert cap(world, world.submit(None)) == 40_960 - 10_000 - 3_000 - 512


def test_on_several_gpus_the_least_room_counts() -> None:
    world = World([40_960, 20_000], rules=OPEN)
    assert cap(world, world.submit(None, gpus=2)) == 20_000


def test_a_task_alone_on_its_gpu_and_a_server_without_caps_set_no_limit() -> None:
    world = World(1, rules=OPEN)
    assert cap(world, world.submit(5_000, exclusive=True)) is None
    free = World(1, rules=replace(OPEN, sharing=Sharing(caps=False)))
    assert cap(free, free.submit(5_000)) is None
    assert cap(free, free.submit(None)) is None


@pytest.mark.parametrize("declared", [None, 5_000])
def test_after_an_oom_a_task_is_held_to_what_is_free_and_books_what_it_asked_for(declared: int | None) -> None:
    world = World(1, rules=OPEN)
    neighbour = world.submit(10_000)
    world.settle()
    world.start(neighbour, mib=4_000)
    task = world.submit(declared)
    world.settle()
    world.start(task, mib=5_000)
    world.oom(task, asked_mib=3_000, peak_mib=6_000)
    world.settle()
    world.wait(5)
    assert cap(world, task) == 40_960 - 10_000 - 512
    assert world.task(task).attempts[-1].placement.booking.memory_mib == 6_000 + 3_000 + 1_024


def test_an_innocent_victim_is_held_to_its_booking_as_before() -> None:
    world = World(1, rules=OPEN)
    guilty = world.submit(5_000)
    victim = world.submit(10_000)
    world.settle()
    world.start(guilty, mib=34_000)
    world.start(victim, mib=6_000)
    world.wait(1)
    world.oom(victim, asked_mib=1_000, peak_mib=6_000)
    world.end(guilty)
    world.settle()
    world.wait(5)
    assert cap(world, victim) == 10_000


def test_after_an_oom_alone_there_is_no_limit() -> None:
    world = World([20_000, 40_960], rules=OPEN)
    task = world.submit(15_000)
    world.settle()
    world.start(task, mib=15_000)
    world.oom(task, asked_mib=40_000, peak_mib=15_000)
    world.settle()
    world.wait(5)
    assert cap(world, task) is None
    assert world.gpus_of(task) == (1,)


# MIG instances.


def mig_world() -> World:
    """One card and two instances, on a server that only uses instances."""
    world = World(1, rules=replace(OPEN, sharing=Sharing(mechanism="mig")))
    parts = tuple(replace(gpu(index, 10_000), kind="mig") for index in (1, 2))
    world.emit(GpusFound(world.now, (gpu(0), *parts)))
    world.wait(1)
    return world


def test_with_mig_only_instances_take_tasks_and_one_each() -> None:
    world = mig_world()
    tasks = [world.submit(1_000) for _ in range(3)]
    world.settle()
    assert [world.gpus_of(task) for task in tasks] == [(1,), (2,), ()]
    world.start(mib=1_000)
    world.wait(30)
    world.settle()
    refusals = [world.refusal(tasks[2], index) for index in range(3)]
    assert refusals[0] is not None
    assert refusals[0].code == "Mechanism"
    assert "is not a MIG instance" in refusals[0].sentence
    assert "`nvidia-smi mig -cgi <profiles> -C`" in refusals[0].sentence
    assert refusals[1] is not None
    assert refusals[1].code == "TasksPerGpu"
    assert refusals[1].sentence == "task 1 is on it; a MIG instance takes one (sharing.mechanism is mig)"
    world.end(tasks[0])
    world.wait(1)
    world.settle()
    assert world.gpus_of(tasks[2]) == (1,)


def test_with_mig_a_server_without_instances_says_so_at_once() -> None:
    world = World(1, rules=replace(OPEN, sharing=Sharing(mechanism="mig")))
    spec = TaskSpec(command=("x",), directory="/")
    assert world.state.never_fits(spec) == (
        "it asks for 1 GPU; this server has 0 that take tasks (only MIG instances do: sharing.mechanism is mig)"
    )


def test_without_that_mechanism_an_instance_is_a_gpu_as_any() -> None:
    world = World(1, rules=OPEN)
    world.emit(GpusFound(world.now, (replace(gpu(0, 10_000), kind="mig"),)))
    world.wait(1)
    tasks = [world.submit(1_000) for _ in range(2)]
    world.settle()
    assert [world.gpus_of(task) for task in tasks] == [(0,), (0,)]
