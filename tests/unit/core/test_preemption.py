"""Tasks that CARMA itself asks to save for the first task in the queue."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from carma.core.model.events import Durable, GpuDrained, PreemptionMissed, PreemptionRequested
from carma.core.model.settings import Preemption, Rules
from carma.core.model.values import GpuId, SaveSignal, TaskId
from carma.core.policies import exclusive, magm
from carma.core.scheduling.explanation import explain
from carma.core.scheduling.placement import Policy
from carma.testing.builders import World

SAVES = SaveSignal(10, 30.0)
ON = Rules(preemption=Preemption(enabled=True, after_s=60.0, least_run_s=100.0, again_s=500.0))
LONG = 1e6  # what all tasks are thought to run


def world_of(gpus: int = 1, rules: Rules = ON, policy: Policy = magm.POLICY) -> World:
    return World(gpus, rules=rules, policy=policy)


def run(world: World, mib: int, *, priority: int = -1, saves: SaveSignal | None = SAVES, **spec: object) -> TaskId:
    return world.run(mib, priority=priority, checkpoint=saves, runtime_s=LONG, **spec)  # type: ignore[arg-type]


def submit(world: World, mib: int, *, priority: int = 0, **spec: object) -> TaskId:
    return world.submit(mib, priority=priority, runtime_s=LONG, **spec)  # type: ignore[arg-type]


def later(world: World, seconds: float) -> list[Durable]:
    world.wait(seconds)
    return world.settle()


def asked(events: Sequence[Durable]) -> list[TaskId]:
    return [event.task for event in events if isinstance(event, PreemptionRequested)]


def test_the_first_task_in_the_queue_gets_the_gpu_of_a_task_of_lower_priority() -> None:
    world = world_of()
    low = run(world, 30_000)
    later(world, 200)
    high = submit(world, 30_000)
    assert later(world, 59) == []
    (event,) = later(world, 1)
    assert isinstance(event, PreemptionRequested)
    assert (event.task, event.by, event.signal, event.grace_s, event.room_for) == (low, "carma", 10, 30.0, high)
    assert event.reason == f"task {high}, of priority 0, waits for its GPUs"
    assert later(world, 5) == [], "asked once"
    world.end(low)
    world.settle()
    assert world.placed(high)
    assert not world.placed(low)
    world.start(high)
    later(world, 30)
    world.end(high)
    world.settle()
    assert world.placed(low), "and then it goes on"


def test_the_reason_of_a_waiting_task_names_the_task_that_was_asked_to_save() -> None:
    world = world_of()
    low = run(world, 30_000)
    later(world, 200)
    high = submit(world, 30_000)
    later(world, 60)
    world.wait(12)
    told = f"task {low} was asked 12 s ago to save and make room"
    assert told in world.why(high).sentence
    assert told in explain(world.state, high, world.now).reason
    assert world.why(high).reserved_start_at == pytest.approx(world.now + 18), "by then it should have left"


@pytest.mark.parametrize(
    "why_not",
    [
        "off",
        "same priority",
        "declares nothing",
        "no room comes of it",
        "just started",
        "drained",
        "it ends soon",
        "is being stopped",
    ],
)
def test_no_task_is_asked_to_save(why_not: str) -> None:
    world = world_of(rules=Rules() if why_not == "off" else ON)
    low = run(
        world,
        30_000,
        priority=0 if why_not == "same priority" else -1,
        saves=None if why_not == "declares nothing" else SAVES,
        **({"time_limit_s": 330.0} if why_not == "it ends soon" else {}),
    )
    if why_not != "just started":
        later(world, 200)
    if why_not == "no room comes of it":
        world.foreign[GpuId("GPU-0")] = 8_000
        world.wait(40)
    submit(world, 36_000)
    if why_not == "drained":
        world.emit(GpuDrained(world.now, None))
    if why_not == "is being stopped":
        world.stop(low)
    assert asked(later(world, 70)) == []


def test_the_fewest_then_the_lowest_priority_then_the_shortest_run() -> None:
    world = world_of(3)
    lone = [run(world, 30_000, priority=-1), run(world, 30_000, priority=-2)]
    pair = [run(world, 15_000, priority=-9), run(world, 15_000, priority=-9)]
    assert [world.gpus_of(task) for task in pair] == [(2,), (2,)]
    later(world, 200)
    submit(world, 30_000)
    assert asked(later(world, 60)) == [lone[1]], "one is fewer than two, and -2 is below -1"


def test_of_the_same_priority_the_one_that_has_run_the_shortest() -> None:
    world = world_of(2)
    first = run(world, 30_000)
    later(world, 100)
    second = run(world, 30_000)
    later(world, 150)
    submit(world, 30_000)
    assert asked(later(world, 60)) == [second]
    assert world.placed(first)


def test_only_those_who_make_room_are_asked() -> None:
    world = world_of()
    small = run(world, 3_000, priority=-9)
    large = run(world, 20_000, priority=-1)
    later(world, 200)
    submit(world, 30_000)
    assert asked(later(world, 60)) == [large], f"not {small}: its end alone makes no room, and is not needed"


def test_both_are_asked_where_it_takes_both() -> None:
    world = world_of()
    both = [run(world, 15_000, priority=-9), run(world, 15_000, priority=-1)]
    later(world, 200)
    high = submit(world, 38_000)
    assert asked(later(world, 60)) == both
    world.end(both[0])
    later(world, 5)
    assert not world.placed(both[0]), "the room that it made is not for itself"
    assert not world.placed(high)
    world.end(both[1])
    world.settle()
    assert world.placed(high)


def test_a_gang_gets_as_many_gpus_as_it_wants() -> None:
    world = world_of(3)
    low = [run(world, 30_000, priority=priority) for priority in (-1, -3, -2)]
    later(world, 200)
    high = submit(world, 30_000, gpus=2)
    assert asked(later(world, 60)) == [low[1], low[2]]
    for task in low[1:]:
        world.end(task)
    world.settle()
    assert len(world.gpus_of(high)) == 2


def test_a_task_on_several_gpus_is_asked_once() -> None:
    world = world_of(2)
    low = run(world, 30_000, gpus=2)
    later(world, 200)
    submit(world, 30_000, gpus=2)
    assert asked(later(world, 60)) == [low]


def test_where_gpus_are_not_shared_the_holder_is_asked() -> None:
    world = world_of(policy=exclusive.POLICY)
    low = run(world, 1_000)
    later(world, 200)
    submit(world, 1_000)
    assert asked(later(world, 60)) == [low]


def test_a_gpu_that_is_too_busy_must_be_left_by_all() -> None:
    world = world_of()
    low = run(world, 1_000)
    run(world, 1_000, priority=0, saves=None)
    world.activity[GpuId("GPU-0")] = (0.95, 0.1, 0.1)
    later(world, 200)
    high = submit(world, 1_000)
    assert asked(later(world, 61)) == []
    assert world.why(high).code == "Utilisation"
    world.end(TaskId(2))
    assert asked(later(world, 40)) == [low]


def test_one_that_did_not_leave_is_not_asked_again_for_a_while() -> None:
    world = world_of()
    low = run(world, 30_000)
    later(world, 200)
    submit(world, 30_000)
    assert asked(later(world, 60)) == [low]
    (missed,) = later(world, 33)
    assert isinstance(missed, PreemptionMissed)
    for _ in range(49):
        assert later(world, 10) == []
    assert asked(later(world, 10)) == [low]


def test_who_does_not_leave_does_not_keep_the_others_from_being_asked() -> None:
    world = world_of(2)
    low = [run(world, 30_000, priority=-2), run(world, 30_000)]
    later(world, 200)
    high = submit(world, 30_000)
    assert asked(later(world, 60)) == [low[0]]
    assert asked(later(world, 33)) == [low[1]]
    world.end(low[1])
    world.settle()
    assert world.placed(high)


def test_only_the_first_task_in_the_queue_preempts_others() -> None:
    world = world_of()
    run(world, 30_000)
    later(world, 200)
    submit(world, 41_000, source="trace", priority=5, gpus=1, exclusive=True)
    submit(world, 30_000)
    events = later(world, 60)
    assert [event.room_for for event in events if isinstance(event, PreemptionRequested)] == [TaskId(2)]
