"""How long the daemon tries to tell a task that it should save; which launches it remembers."""

from __future__ import annotations

import asyncio

import pytest

from carma.core.model.commands import LaunchAttempt
from carma.core.model.events import PreemptionRequested
from carma.core.model.values import AttemptKey, SaveSignal
from carma.daemon.executor import may_ask_to_save
from carma.store.memory import MemoryStore
from carma.testing.builders import World
from carma.testing.fake_launcher import FakeLauncher, Plan
from tests.unit.daemon.shells import make_executor, make_shell


@pytest.mark.parametrize(("after_s", "told"), [(0.0, True), (15.0, True), (15.1, False), (40.0, False)])
def test_a_task_is_asked_to_save_only_while_half_of_its_grace_is_left(after_s: float, told: bool) -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SaveSignal(10, 30.0))
    key, asked_at = world.state.active[task], world.now
    assert not may_ask_to_save(world.state, key, asked_at, world.now), "no request was made"
    world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0))
    assert may_ask_to_save(world.state, key, asked_at, asked_at + after_s) is told
    assert not may_ask_to_save(world.state, key, asked_at - 1.0, asked_at), "another request"
    assert not may_ask_to_save(world.state, AttemptKey(task, 2), asked_at, asked_at), "another attempt"
    world.end(task)
    assert not may_ask_to_save(world.state, key, asked_at, asked_at)


@pytest.mark.parametrize("ends", [False, True])
def test_a_launch_is_remembered_only_while_its_attempt_is_active(ends: bool) -> None:
    """The attempt may end while the launch waits for the frameworks of its command."""
    world = World(1)
    task = world.submit(1_000)
    world.settle()
    key = world.state.active[task]
    placement = world.task(task).attempts[-1].placement
    command = LaunchAttempt(key, world.task(task).owner, world.task(task).spec, placement)

    async def work() -> bool:
        executor = make_executor(make_shell(MemoryStore(), world.state), FakeLauncher(lambda _order: Plan()))
        executor.execute(command, world.now)
        if ends:
            world.end(task)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        try:
            return executor.is_ordered(key, since_s=0.0)
        finally:
            await executor.close()

    assert asyncio.run(work()) is not ends
