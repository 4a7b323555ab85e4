"""What tests of recovery ask of a world."""

from __future__ import annotations

from carma.core.model.outcome import OutOfMemory
from carma.core.model.status import Recovering
from carma.core.model.task import Plan
from carma.core.model.values import TaskId
from carma.testing.builders import World


def plan(world: World, task: TaskId) -> Plan:
    found = world.task(task).plan
    assert found is not None
    return found


def back(world: World, task: TaskId) -> None:
    """Over the back-off, and onto a GPU again."""
    status = world.task(task).status
    assert isinstance(status, Recovering)
    assert status.until is not None
    world.wait(max(0.0, status.until - world.now) + 1)
    world.settle()


def given_up(world: World, task: TaskId) -> OutOfMemory:
    outcome = world.outcome(task)
    assert isinstance(outcome, OutOfMemory)
    return outcome
