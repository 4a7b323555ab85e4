"""Cancelling in each state, and time limits with the warning that goes before them."""

from __future__ import annotations

import pytest

from carma.core.model.commands import StopAttempt, WarnAttempt
from carma.core.model.events import (
    AttemptStarted,
    StopRequested,
    TaskChanged,
    TaskEstimated,
    TaskSubmitted,
    TaskWarned,
)
from carma.core.model.outcome import Cancelled, Failed, Succeeded, TimedOut
from carma.core.model.status import Recovering
from carma.core.model.values import TaskId, TaskSpec, WarnSignal
from carma.testing.builders import ALICE, World

ONE = TaskId(1)


# -- cancelling -------------------------------------------------------------------------------------------------------
def test_cancel_while_estimating() -> None:
    world = World(1)
    world.emit(TaskSubmitted(world.now, ONE, ALICE, TaskSpec(command=("x",), directory="/")))
    assert world.stop(ONE) == []
    assert world.outcome(ONE) == Cancelled("alice")
    world.emit(TaskEstimated(world.now, ONE, None))
    world.settle()
    assert world.outcome(ONE) == Cancelled("alice")


@pytest.mark.parametrize("held", [True, False])
def test_cancel_while_queued(held: bool) -> None:
    world = World(1)
    task = world.submit(1_000, held=held)
    assert world.stop(task) == []
    assert world.outcome(task) == Cancelled("alice")
    assert world.settle() == []


def test_cancel_while_starting_stops_it_as_soon_as_it_runs() -> None:
    world = World(1)
    task = world.submit(1_000, grace_s=3.0)
    world.settle()
    key = world.state.active[task]
    assert world.stop(task) == [StopAttempt(key, 5.0, 15)]
    assert world.emit(AttemptStarted(world.now, key, 5)) == [StopAttempt(key, 3.0)]
    world.end(task, Failed(143))
    world.settle()
    assert world.outcome(task) == Cancelled("alice")


def test_cancel_while_running_is_over_when_the_process_is() -> None:
    world = World(1)
    task = world.run(1_000)
    key = world.state.active[task]
    assert world.stop(task) == [StopAttempt(key, 5.0, 15)]
    assert world.outcome(task) is None
    assert world.view(0).holders, "its memory is held until the process is gone"
    assert world.stop(task, "bob") == [StopAttempt(key, 5.0, 15)], "asked again, told again"
    world.end(task, Failed(137))
    world.settle()
    assert world.outcome(task) == Cancelled("alice"), "the first who asked"


def test_cancel_while_recovering() -> None:
    world = World(1)
    task = world.run(1_000)
    world.oom(task)
    world.settle()
    assert isinstance(world.task(task).status, Recovering)
    assert world.stop(task) == []
    assert world.outcome(task) == Cancelled("alice")
    world.wait(10)
    assert world.settle() == []


def test_cancel_when_finished_changes_nothing() -> None:
    world = World(1)
    task = world.run(1_000)
    world.end(task)
    world.settle()
    assert world.stop(task) == []
    assert world.outcome(task) == Succeeded()


# -- time limits ------------------------------------------------------------------------------------------------------
def test_a_time_limit_counts_from_the_start_and_stops_the_task_once() -> None:
    world = World(1)
    task = world.submit(1_000, time_limit_s=60.0, grace_s=2.0)
    world.settle()
    world.wait(100)  # starting does not count
    world.settle()
    assert world.placed(task)
    world.start(task)
    world.wait(59)
    assert not any(isinstance(event, StopRequested) for event in world.settle())
    world.wait(1)
    assert world.settle() == [StopRequested(world.now, task, TimedOut(60.0), 2.0)]
    assert world.commands[-1] == StopAttempt(world.state.active[task], 2.0, 15)
    world.wait(5)
    assert world.settle() == []
    world.end(task, Failed(143))
    world.settle()
    assert world.outcome(task) == TimedOut(60.0)


def test_a_warning_signal_goes_before_the_limit_once() -> None:
    world = World(1)
    task = world.submit(1_000, time_limit_s=60.0, warn=WarnSignal(10, 20.0))
    world.settle()
    world.start(task)
    world.wait(39)
    assert not any(isinstance(event, TaskWarned) for event in world.settle())
    world.wait(1)
    assert world.settle() == [TaskWarned(world.now, task, 10)]
    assert world.commands[-1] == WarnAttempt(world.state.active[task], 10)
    world.wait(10)
    assert world.settle() == []


def test_a_new_time_limit_holds_for_a_running_task() -> None:
    world = World(1)
    task = world.run(1_000, time_limit_s=1_000.0)
    world.emit(TaskChanged(world.now, task, time_limit_s=5.0))
    assert [type(event) for event in world.settle()] == [StopRequested]
