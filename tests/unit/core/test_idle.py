"""Idle holders: noticed by what is observed, packed over or ended only where the setting says so."""

from __future__ import annotations

import pytest

from carma.core.model import events as e
from carma.core.model.outcome import Cancelled
from carma.core.model.settings import IdleRules, Rules
from carma.core.model.status import Running
from carma.core.model.values import GpuId, IdleAction, Notify, TaskId
from carma.core.policies.goodput import POLICY as GOODPUT
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.testing.builders import World

GPU = GpuId("GPU-0")
BUSY, IDLE, UNKNOWN = (0.5, 0.2, 0.1), (0.0, 0.0, 0.0), (None, None, None)


def world(action: IdleAction = "show", **more: object) -> World:
    return World(1, rules=Rules(idle=IdleRules(after_s=600.0, action=action, warn_s=120.0)), **more)  # type: ignore[arg-type]


def pass_time(world: World, seconds: float) -> list[e.Durable]:
    """Samples every five seconds, and the events about idle holders that are proposed meanwhile."""
    kinds = (e.IdleNoted, e.IdleOver, e.StopRequested)
    done: list[e.Durable] = []
    for _ in range(int(seconds / 5)):
        world.wait(5, every_s=5)
        done += [event for event in world.settle() if isinstance(event, kinds)]
    return done


def busy_until_now(world: World, **spec: object) -> TaskId:
    world.activity[GPU] = BUSY
    task = world.run(4_096, **spec)  # type: ignore[arg-type]
    assert pass_time(world, 700) == []
    return task


def is_idle(world: World, task: TaskId) -> bool:
    status = world.task(task).status
    return isinstance(status, Running) and status.idle is not None


def test_a_task_that_stops_using_the_sms_is_noticed_once_and_no_longer_when_it_uses_them() -> None:
    server = world()
    task = busy_until_now(server, notify=Notify(targets=("mail",)))
    since = server.now
    server.activity[GPU] = IDLE
    assert pass_time(server, 595) == []
    assert pass_time(server, 700) == [e.IdleNoted(since + 600, task, since, "show")]
    assert [notice.kind for notice in server.task(task).notices] == ["idle"]
    server.activity[GPU] = BUSY
    assert pass_time(server, 20) == [e.IdleOver(server.now - 15, task)]
    assert not is_idle(server, task)


def test_an_idle_task_beside_a_busy_one_is_found() -> None:
    server = world()
    idle = busy_until_now(server)
    server.activity[GPU] = IDLE
    pass_time(server, 60)
    other = server.submit(4_096)
    server.settle()
    server.start(other)
    server.activity[GPU] = BUSY
    pass_time(server, 900)
    assert (is_idle(server, idle), is_idle(server, other)) == (True, False)


@pytest.mark.parametrize("how", ["unknown activity", "no memory", "switched off", "a gap in the samples"])
def test_these_are_not_idle_holders(how: str) -> None:
    server = world() if how != "switched off" else World(1, rules=Rules(idle=IdleRules(after_s=0.0)))
    task = busy_until_now(server)
    server.activity[GPU] = IDLE
    pass_time(server, 60)
    server.activity[GPU] = UNKNOWN if how == "unknown activity" else IDLE
    if how == "no memory":
        server.memory.clear()
    if how == "a gap in the samples":
        pass_time(server, 400)
        server.wait(300, every_s=300)
        assert pass_time(server, 590) == []
    else:
        assert pass_time(server, 2_000) == []
    assert not is_idle(server, task)


def test_an_idle_holder_is_ended_after_the_warning() -> None:
    server = world("end")
    task = busy_until_now(server)
    server.activity[GPU] = IDLE
    noted, stopped = pass_time(server, 725)
    assert isinstance(noted, e.IdleNoted)
    assert isinstance(stopped, e.StopRequested)
    assert stopped.task == task
    assert isinstance(stopped.ending, Cancelled)
    assert stopped.at - noted.at == 120.0


def test_use_after_the_warning_saves_the_task() -> None:
    server = world("end")
    task = busy_until_now(server)
    server.activity[GPU] = IDLE
    pass_time(server, 700)
    assert is_idle(server, task)
    server.activity[GPU] = BUSY
    assert [type(event) for event in pass_time(server, 600)] == [e.IdleOver]


def test_after_a_restart_the_idle_time_is_observed_again_from_its_beginning() -> None:
    server = world("end")
    task = busy_until_now(server)
    server.activity[GPU] = IDLE
    pass_time(server, 700)
    saved, _ = checkpoint(server.state, len(server.log))
    server.state = restore(server.state.rules, server.state.policy, saved)
    assert is_idle(server, task)
    server.now += 1_000
    assert [type(event) for event in pass_time(server, 600)] == [e.IdleOver]
    assert [type(event) for event in pass_time(server, 200)] == [e.IdleNoted, e.StopRequested]


@pytest.mark.parametrize("action", ["show", "pack"])
def test_packing_over_an_idle_holder_counts_its_activity_as_nothing(action: IdleAction) -> None:
    server = world(action, policy=GOODPUT)
    task = busy_until_now(server)
    server.emit(e.IdleNoted(server.now, task, server.now - 600, action))
    holder = server.view(0).holders[0]
    assert holder.demand is not None
    assert (holder.demand.sm_active == 0.0) == (action == "pack")


def test_a_paused_task_is_no_idle_holder_and_the_pause_does_not_count_afterwards() -> None:
    server = world()
    task = busy_until_now(server)
    server.activity[GPU] = IDLE
    assert pass_time(server, 300) == []
    server.emit(e.TaskPaused(server.now, task, "alice"))
    assert pass_time(server, 900) == []
    server.emit(e.TaskUnpaused(server.now, task, "alice"))
    assert pass_time(server, 250) == []
    pass_time(server, 100)
    assert is_idle(server, task)
