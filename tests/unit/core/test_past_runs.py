"""What an ended attempt leaves for history, and what a task asks for of which only that is known."""

from __future__ import annotations

import pytest

from carma.core import attempt_end as ending
from carma.core.model.events import TaskEstimated, TaskSubmitted
from carma.core.model.outcome import Failed, Outcome, OutOfMemory
from carma.core.model.values import Booking, Estimate, NoEstimate, TaskId, TaskSpec
from carma.core.ports import PastRun
from carma.core.scheduling.eligibility import ask_of
from carma.daemon import found_attempts as finder
from carma.testing.builders import ALICE, World

SPEC = TaskSpec(command=("python", "train.py"), directory="/")


def ended(world: World, task: TaskId, outcome: Outcome) -> PastRun:
    key = world.state.active[task]
    world.emit(ending.ended(world.state, key, outcome, world.now))
    run = finder.past_run(world.state, key, collocated=False)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("outcome", "holds_mib", "wanted"),
    [
        (OutOfMemory("gpu", 1, 2_048, 5_500), 5_000, 7_548),  # what it held by its own words, and asked for
        (OutOfMemory("gpu", 1, None, None), 5_000, 5_000),
        (OutOfMemory("gpu", 1, 900, None), 0, 900),
        (OutOfMemory("gpu", 1, None, None), 0, None),
        (OutOfMemory("host", 137), 5_000, None),
        (Failed(1), 5_000, None),
    ],
)
def test_one_that_ran_out_of_memory_says_what_was_not_enough(
    outcome: Outcome, holds_mib: int, wanted: int | None
) -> None:
    world = World(1)
    task = world.submit(8_000)
    world.settle()
    world.start(task, mib=holds_mib)
    world.wait(3)
    assert ended(world, task, outcome).more_than_mib == wanted


def test_it_knows_what_was_run() -> None:
    world = World(1)
    task = TaskId(1)
    world.emit(TaskSubmitted(world.now, task, ALICE, SPEC))
    estimate = Estimate(footprint_mib=7_000, upper_mib=7_000, source="trace")
    world.emit(TaskEstimated(world.now, task, estimate, (), "abc"))
    world.settle()
    world.start(task)
    assert ended(world, task, Failed(1)).fingerprint == "abc"


@pytest.mark.parametrize(("more_than_mib", "asked_mib"), [(None, 5_120), (1_000, 5_120), (9_000, 9_000 + 1_024)])
def test_one_of_unknown_size_asks_for_more_than_what_was_not_enough(more_than_mib: int | None, asked_mib: int) -> None:
    world = World(1)
    task = TaskId(1)
    world.emit(TaskSubmitted(world.now, task, ALICE, SPEC))
    refusal = NoEstimate(source="history", reason="it ran out of memory", more_than_mib=more_than_mib)
    world.emit(TaskEstimated(world.now, task, None, (refusal,)))
    assert (ask_of(world.task(task), world.state).memory_mib) == asked_mib
    world.settle()
    booking: Booking = world.task(task).attempts[-1].placement.booking
    assert (booking.memory_mib, booking.source) == (asked_mib, "unknown")
