"""A policy moves some tasks ahead: lists and notes use the same order, and no task waits without end."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.core.model.settings import QueueRules, Rules
from carma.core.model.values import TaskId
from carma.core.policies import exclusive
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.policy import Waits
from carma.core.scheduling.queue_order import queued_ids
from carma.testing.builders import World

RUNS, OLDEST, LONG, NEWEST = (TaskId(number) for number in (1, 2, 3, 4))


def longest(waits: Sequence[Waits], _running_s: float, _gpus: int) -> list[int]:
    """All who take more than an hour."""
    return [place for place, one in enumerate(waits) if one.alone_s is not None and one.alone_s > 3600]


POLICY = replace(exclusive.POLICY, name="longest", urgent=longest)


def full(overtakes: int = 8) -> World:
    """One GPU that is taken, and three that wait: the second would take ten hours."""
    world = World(1, policy=POLICY, rules=Rules(queue=QueueRules(overtakes=overtakes)))
    world.run(1_000)
    for hours in (0.5, 10.0, 0.5):
        world.submit(1_000, runtime_s=hours * 3600)
    world.settle()
    return world


def line(world: World) -> list[TaskId]:
    return list(queued_ids(world.state, world.now))


def test_the_line_is_listed_in_the_order_in_which_turns_come() -> None:
    assert line(full()) == [LONG, OLDEST, NEWEST]


def test_only_the_two_tasks_concerned_get_a_note_about_overtaking() -> None:
    world = full()
    told = waiting(world.state, world.now)
    assert "policy longest lets it go first" in told[LONG].sentence
    assert "should start in" in told[LONG].sentence
    assert "policy longest lets task 3 go first" in told[OLDEST].sentence
    assert "policy" not in told[NEWEST].sentence
    for task in (OLDEST, LONG):
        assert "policy longest lets" in explain(world.state, task, world.now).reason


def test_it_does_go_first() -> None:
    world = full()
    world.end(RUNS)
    world.wait(5)
    world.settle()
    assert [world.placed(task) for task in (OLDEST, LONG, NEWEST)] == [False, True, False]


def test_no_task_is_overtaken_more_often_than_the_settings_allow() -> None:
    world = full(overtakes=0)
    assert line(world) == [OLDEST, LONG, NEWEST]
    assert "lets" not in waiting(world.state, world.now)[OLDEST].sentence


def test_a_task_whose_turn_it_is_anyway_gets_no_note() -> None:
    world = full()
    world.stop(OLDEST)
    world.settle()
    assert line(world) == [LONG, NEWEST]
    assert "lets" not in waiting(world.state, world.now)[LONG].sentence
