"""Requests to a running task to save a checkpoint: the consequences in each case; no request stops a task."""

from __future__ import annotations

import msgspec
import pytest

from carma.core.checkpoint_request import LATE_S
from carma.core.machine import step
from carma.core.model.commands import PreemptAttempt, StopAttempt
from carma.core.model.events import (
    AttemptEnded,
    Durable,
    PreemptionMissed,
    PreemptionRequested,
    RecoveryDue,
    RecoveryPlanned,
    StopRequested,
    TaskReleased,
)
from carma.core.model.outcome import Cancelled, Failed, Lost, Outcome, OutOfMemory, Preempted, Succeeded, TimedOut
from carma.core.model.settings import RecoveryRules, Rules
from carma.core.model.status import Queued, Recovering, Running
from carma.core.model.values import SaveSignal, TaskId
from carma.core.state import State
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.testing.builders import World

SAVES = SaveSignal(10, 30.0)


def ask(world: World, task: TaskId, *, hold: bool = False, by: str = "alice") -> PreemptionRequested:
    event = PreemptionRequested(world.now, task, by, 10, 30.0, hold=hold)
    world.emit(event)
    return event


def running(world: World, task: TaskId) -> Running:
    status = world.task(task).status
    assert isinstance(status, Running)
    return status


def test_a_preempted_task_gets_its_signal_and_runs_until_it_ends() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    key = world.state.active[task]
    assert world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0)) == [PreemptAttempt(key, 10, world.now)]
    world.wait(29)
    assert world.settle() == []
    assert world.view(0).holders, "its memory is held until the process is gone"
    assert running(world, task).preempting is not None


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Succeeded(), 0),
        (Failed(3), 3),
        (Failed(138, "ended by SIGUSR1"), 138),
        (OutOfMemory("gpu", 1, 100, 500), 1),
        (OutOfMemory("host", 137), 137),
        (Lost("its runner was killed"), None),
    ],
)
def test_whatever_it_ends_with_in_time_it_was_preempted_and_comes_back(ended: Outcome, code: int | None) -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task)
    world.wait(5)
    world.end(task, ended)
    done = world.settle()
    assert world.task(task).attempts[0].outcome == Preempted("alice", "", code)
    assert [type(event) for event in done[:2]] == [RecoveryPlanned, RecoveryDue]
    assert world.placed(task), "no other task needs the GPU"
    assert world.state.active[task].attempt == 2
    assert not world.state.preempting
    assert running_after_start(world, task).preempting is None


def running_after_start(world: World, task: TaskId) -> Running:
    world.start(task)
    return running(world, task)


def test_its_place_in_the_queue_is_that_of_its_submission() -> None:
    world = World(1)
    first = world.run(30_000, checkpoint=SAVES)
    second = world.submit(30_000)
    world.settle()
    assert not world.placed(second)
    ask(world, first)
    world.end(first)
    world.settle()
    assert world.placed(first), "it was submitted first"
    assert not world.placed(second)


def test_with_hold_it_waits_for_its_release() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task, hold=True)
    world.end(task)
    world.settle()
    assert world.task(task).status == Queued(world.now, held=True)
    assert world.why(task).code == "Held"
    world.emit(TaskReleased(world.now, task))
    world.settle()
    assert world.placed(task)


def test_a_repeated_request_sends_one_signal_and_can_add_hold() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    first = ask(world, task, by="carma")
    world.wait(3)
    assert world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0, hold=True)) == []
    asked = running(world, task).preempting
    assert asked is not None
    assert (asked.at, asked.by, asked.hold) == (first.at, "carma", True)


def test_a_task_that_does_not_leave_in_time_goes_on() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task)
    world.wait(30 + LATE_S)
    assert world.settle() == []
    world.wait(1)
    assert world.settle() == [PreemptionMissed(world.now, task)]
    assert running(world, task).preempting is None
    assert running(world, task).stayed_at == world.now
    world.wait(300)
    assert world.settle() == []
    assert not any(isinstance(command, StopAttempt) for command in world.commands)
    world.end(task, Failed(4))
    world.settle()
    assert world.outcome(task) == Failed(4), "what happens long after is its own"


def test_an_end_that_is_observed_late_counts_by_its_time() -> None:
    """The daemon was away: the runner wrote down when it ended."""
    for after_s, expected in ((20.0, Preempted("alice", "", 3)), (40.0, Failed(3))):
        world = World(1)
        task = world.run(1_000, checkpoint=SAVES)
        ask(world, task)
        world.now += after_s
        world.end(task, Failed(3))
        assert world.task(task).attempts[0].outcome == expected


def test_a_task_that_ended_before_the_signal_ended_by_itself() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task, hold=True)
    key = world.state.active[task]
    world.emit(AttemptEnded(world.now, key, Succeeded(), untold=True))
    world.settle()
    assert world.outcome(task) == Succeeded()


def test_a_task_without_checkpoint_signal_never_gets_one() -> None:
    world = World(1)
    task = world.run(1_000)
    assert world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0)) == []
    assert not world.state.preempting


def test_a_task_that_does_not_run_gets_no_signal() -> None:
    world = World(1)
    task = world.submit(1_000, checkpoint=SAVES)
    for _ in range(2):  # queued, then starting
        assert world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0)) == []
        world.settle()
    assert world.state.preempting == set()


def test_a_cancellation_during_a_preemption_ends_the_task() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task, hold=True)
    world.stop(task)
    world.wait(60)
    assert world.settle() == [], "its grace is of no interest any more"
    world.end(task, Failed(143))
    world.settle()
    assert world.outcome(task) == Cancelled("alice")


def test_a_stopping_task_gets_no_checkpoint_signal() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    world.stop(task)
    assert world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0)) == []


def test_the_time_limit_is_the_users_own_and_holds_meanwhile() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES, time_limit_s=30.0)
    ask(world, task)
    world.wait(20)
    assert [type(event) for event in world.settle()] == [StopRequested]
    world.end(task, Failed(143))
    world.settle()
    assert world.outcome(task) == TimedOut(30.0)


def test_preemptions_do_not_count_as_retries_and_the_plan_stays() -> None:
    world = World(1, rules=Rules(recovery=RecoveryRules(retries=1, backoff_s=0.0)))
    task = world.run(1_000, checkpoint=SAVES)
    world.oom(task, asked_mib=500, peak_mib=1_000)
    world.settle()
    world.start(task)
    learnt = world.task(task).plan
    assert learnt is not None
    for _ in range(5):
        ask(world, task)
        world.end(task, Failed(1))
        world.settle()
        plan = world.task(task).plan
        assert plan is not None
        assert (plan.rung, plan.memory_mib, plan.first) == (learnt.rung, learnt.memory_mib, False)
        world.start(task)
    assert len(world.task(task).attempts) == 7
    world.oom(task)
    world.settle()
    assert isinstance(world.outcome(task), OutOfMemory), "the second of its own"


def test_it_comes_back_even_if_it_must_not_be_run_twice_after_an_oom() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES, max_oom_retries=0)
    ask(world, task)
    world.end(task)
    world.settle()
    assert world.placed(task)


def test_a_log_and_a_checkpoint_bring_the_request_back() -> None:
    world = World(1)
    task = world.run(1_000, checkpoint=SAVES)
    ask(world, task, hold=True)
    decode = msgspec.json.Decoder(Durable).decode
    again = State(world.state.rules, world.state.policy)
    for event in world.log:
        step(again, decode(msgspec.json.encode(event)))
    assert again.tasks == world.state.tasks
    assert again.preempting == {task}
    saved, _ = checkpoint(world.state, 1)
    loaded = msgspec.json.decode(msgspec.json.encode(saved), type=type(saved))
    assert restore(world.state.rules, world.state.policy, loaded).preempting == {task}


def test_statuses_of_an_older_version_are_read() -> None:
    old = b'{"state":"recovering","since":5.0,"until":7.0}'
    assert msgspec.json.decode(old, type=Recovering) == Recovering(5.0, 7.0)
    placement = b'{"gpus":["GPU-0"],"booking":{"memory_mib":5,"source":"history"}}'
    running = b'{"state":"running","since":5.0,"placement":%b,"pid":9,"ending":null,"warned":false}' % placement
    read = msgspec.json.decode(running, type=Running)
    assert (read.preempting, read.stayed_at) == (None, None)
