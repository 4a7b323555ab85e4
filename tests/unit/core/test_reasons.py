"""The sentence that a waiting task shows: one reason, with its numbers."""

from __future__ import annotations

from carma.core.model.events import GpuDrained
from carma.core.model.outcome import NeverFits
from carma.core.model.settings import Memory, QueueRules, Rules
from carma.core.model.values import GpuId, TaskId
from carma.core.policies import exclusive
from carma.core.scheduling.eligibility import Waiting
from carma.core.scheduling.explanation import explain
from carma.testing.builders import World


def full(*rooms_mib: int, margin_mib: int = 0) -> World:
    """GPUs of 40 GiB with just so much room, each with one settled task."""
    world = World(len(rooms_mib), rules=Rules(memory=Memory(margin_mib=margin_mib)))
    for room in rooms_mib:
        world.submit(40_960 - room)
    world.settle()
    world.start()
    world.wait(30)
    world.settle()
    rooms = [world.view(index).room_mib for index in range(len(rooms_mib))]
    assert rooms == list(rooms_mib)
    return world


def sentence(world: World, task: TaskId) -> str:
    return world.why(task).sentence.split("; should start")[0]


def test_what_is_needed_and_where_most_is_free() -> None:
    world = full(1_000, 5_000, 9_318, 2_000)
    task = world.submit(12_698)
    assert world.why(task).code == "Memory"
    assert sentence(world, task) == "needs 12.4 GiB; most free is 9.1 GiB on GPU 2"


def test_what_is_free_is_told_after_the_margin() -> None:
    world = full(9_000, margin_mib=512)
    task = world.submit(8_900)
    assert sentence(world, task) == "needs 8.7 GiB; most free is 8.3 GiB on GPU 0"


def test_a_figure_that_just_misses_is_told_in_mib() -> None:
    world = full(9_318)
    task = world.submit(9_319)
    assert sentence(world, task) == "needs 9,319 MiB; most free is 9,318 MiB on GPU 0"


def test_memory_speaks_for_the_whole_and_the_others_are_counted() -> None:
    world = full(5_000, 9_318, 3_000)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "x"))
    task = world.submit(12_698)
    assert sentence(world, task) == "needs 12.4 GiB; most free is 4.9 GiB on GPU 0; others: 1 drained"


def test_a_gang_says_how_many_could_take_it() -> None:
    world = full(5_000, 30_000, 4_000)
    task = world.submit(20_000, gpus=2)
    assert (
        sentence(world, task) == "needs 2 GPUs; 1 of 3 can take it now; needs 19.5 GiB; most free is 4.9 GiB on GPU 0"
    )


def test_the_reason_that_is_likely_to_pass_first_is_the_one_that_is_told() -> None:
    world = World(2)
    newcomer = world.submit(None)
    world.settle()
    world.start(newcomer)
    world.wait(5)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "repair"))
    why = world.why(world.submit(1_000))
    assert why.code == "WarmUp"
    assert why.sentence.startswith(
        "GPU 0: task 1 is warming up: it first used the GPU 4 s ago; it must stay steady for 20 s, 16 s to go; "
        "others: 1 drained"
    )


def test_several_tasks_on_a_gpu_are_told_in_the_plural() -> None:
    world = World(1)
    world.run(1_000)
    world.run(1_000)
    why = world.why(world.submit(1_000, exclusive=True))
    assert why.sentence.startswith("GPU 0: the task wants a GPU alone; tasks 1, 2 are on it")


def test_the_exclusive_policy_says_who_is_there() -> None:
    world = World(1, policy=exclusive.POLICY)
    world.run(1_000)
    assert sentence(world, world.submit(1_000)) == "GPU 0: task 1 is on it, and the policy does not share GPUs"


def test_a_placement_says_why_there() -> None:
    world = World(2)
    task = world.submit(1_000)
    world.settle()
    assert world.task(task).attempts[0].decision == "placed on GPU 0: idle, room 40.0 GiB"


def test_a_shared_placement_says_so() -> None:
    world = World(1)
    world.run(1_000)
    task = world.run(1_000)
    assert world.task(task).attempts[0].decision == "placed on GPU 0: shared, room 39.0 GiB"


def test_more_gpus_than_there_are_is_a_sentence_and_not_a_crash() -> None:
    world = World(2, rules=Rules(queue=QueueRules(misfits="end")))
    task = world.submit(1_000, gpus=3)
    decision = explain(world.state, task, world.now)
    assert decision.reason == "it asks for 3 GPUs; this server has 2"
    assert world.why(task) == Waiting("NeverFits", "it asks for 3 GPUs; this server has 2")
    world.settle()
    assert world.outcome(task) == NeverFits("it asks for 3 GPUs; this server has 2")
