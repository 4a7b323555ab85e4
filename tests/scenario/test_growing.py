"""Tasks that need far more than they said, under limits: the number of attempts, and that no other task fails.

A played task grows block by block, as a framework's allocator does: it tells no more than the block that was refused.
"""

from __future__ import annotations

from typing import Literal

import pytest

from carma.core.model.events import AttemptStarted, StopRequested
from carma.core.model.outcome import OutOfMemory, Succeeded
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.status import Running
from carma.core.model.values import AttemptKey, Confinement, Guard, TaskId
from carma.core.telemetry.observation import to_watch
from carma.testing.builders import World

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))
BLOCK_MIB = 512
GIB = 1_024
Rung = Literal["mps", "framework", "cgroup"]


def guards_of(world: World, key: AttemptKey, rung: Rung) -> tuple[Guard, ...]:
    """Guards as the launcher arranges them: the limit at the cap, the watchdog at the booking."""
    booking = world.task(key.task).attempts[-1].placement.booking
    if booking.alone or booking.cap_mib is None:
        return ()
    return (Guard(rung=rung, limit_mib=booking.cap_mib), Guard(rung="watchdog", limit_mib=booking.memory_mib))


def launch(world: World, task: TaskId, rung: Rung = "mps") -> AttemptKey:
    world.settle()
    key = world.state.active[task]
    guards = guards_of(world, key, rung)
    world.emit(AttemptStarted(world.now, key, 10_000 + task, Confinement(mechanism="mps", guards=guards)))
    world.memory[key] = 0
    return key


def limit_mib(world: World, key: AttemptKey) -> int:
    """Where the next block is refused: its own limit, or what the others leave of the card."""
    attempt = world.task(key.task).attempts[-1]
    assert attempt.confinement is not None
    limits = [guard.limit_mib for guard in attempt.confinement.guards if guard.rung != "watchdog"]
    for gpu in attempt.placement.gpus:
        others = sum(world.memory.get(other, 0) for other in world.state.on_gpu[gpu] if other != key)
        limits.append(world.state.gpus[gpu].memory_mib - others)
    return min(limits)


def grow(world: World, task: TaskId, needs_mib: int, rung: Rung = "mps", block_mib: int = BLOCK_MIB) -> None:
    """One attempt, from its launch to its end, or to the moment when the watchdog has stopped it."""
    key = launch(world, task, rung)
    while world.memory[key] < needs_mib:
        if world.memory[key] + block_mib > limit_mib(world, key):
            world.oom(task, asked_mib=block_mib, peak_mib=world.memory[key])
            return
        world.memory[key] += block_mib
        world.wait(0.5)
        if any(isinstance(event, StopRequested) for event in world.settle()):
            world.end(task)
            return
    world.end(task)


def until_over(world: World, task: TaskId, needs_mib: int, rung: Rung = "mps", block_mib: int = BLOCK_MIB) -> int:
    """The number of attempts that it took to succeed."""
    for _ in range(10):
        grow(world, task, needs_mib, rung, block_mib)
        world.settle()
        if world.outcome(task) is not None:
            break
        world.wait(70)
    assert world.outcome(task) == Succeeded()
    return len(world.task(task).attempts)


@pytest.mark.parametrize("rung", ["mps", "framework", "cgroup"])
def test_four_gib_declared_and_23_needed_are_two_attempts(rung: Rung) -> None:
    world = World(1, rules=OPEN)
    task = world.submit(4 * GIB)
    assert until_over(world, task, 23 * GIB, rung) == 2
    first, second = world.task(task).attempts
    assert (first.placement.booking.cap_mib, first.blame) == (4 * GIB, "own")
    booking = second.placement.booking
    assert (booking.memory_mib, booking.source, booking.alone) == (6 * GIB, "recovery", False)
    assert booking.cap_mib == 40 * GIB


def test_beside_a_neighbour_that_keeps_what_it_booked() -> None:
    """Its neighbour has taken little of its booking so far, and can take all of it at any time."""
    world = World(1, rules=OPEN)
    neighbour = world.submit(12 * GIB)
    key = launch(world, neighbour)
    world.memory[key] = GIB
    world.wait(1)
    task = world.submit(4 * GIB)
    assert until_over(world, task, 23 * GIB) == 2
    assert isinstance(world.task(neighbour).status, Running)
    assert world.task(task).attempts[1].placement.booking.cap_mib == 40 * GIB - 12 * GIB - 512


def test_memory_above_the_booking_counts_as_booked_so_that_no_task_is_placed_there() -> None:
    world = World(1, rules=OPEN)
    task = world.submit(4 * GIB)
    grow(world, task, 23 * GIB)
    world.settle()
    world.wait(70)
    key = launch(world, task)
    world.memory[key] = 23 * GIB
    world.wait(1)
    world.settle()
    newcomer = world.submit(20 * GIB)
    world.settle()
    assert not world.placed(newcomer)
    assert world.why(newcomer).code == "Memory"


def test_above_its_booking_and_below_its_limit_it_goes_before_a_newcomers_booking_does() -> None:
    """One that came later has booked what it had not taken yet; the two limits add up to more than the card."""
    world = World(1, rules=OPEN)
    task = world.submit(4 * GIB)
    grow(world, task, 23 * GIB)
    world.settle()
    world.wait(70)
    launch(world, task)
    world.wait(1)
    newcomer = world.submit(30 * GIB)
    other = launch(world, newcomer)
    world.memory[other] = GIB
    assert to_watch(world.state) == (world.state.gpus[world.task(task).attempts[-1].placement.gpus[0]].id,)
    key = world.state.active[task]
    while world.memory[key] < 23 * GIB:
        world.memory[key] += BLOCK_MIB
        world.wait(0.5)
        if any(isinstance(event, StopRequested) for event in world.settle()):
            break
    world.end(task)
    world.settle()
    attempt = world.task(task).attempts[-1]
    assert isinstance(attempt.outcome, OutOfMemory)
    assert "stopped by the watchdog" in attempt.outcome.message
    assert attempt.blame == "own"
    plan = world.task(task).plan
    assert plan is not None
    assert (plan.rung, plan.memory_mib) == ("larger", (attempt.observed_mib or 0) + 1_024)
    assert isinstance(world.task(newcomer).status, Running)


def test_growth_does_not_keep_a_task_from_a_card_where_what_it_asked_for_fits() -> None:
    world = World(1, rules=OPEN, memory_mib=24 * GIB)
    task = world.submit(18 * GIB)
    grow(world, task, 19 * GIB)
    world.settle()
    plan = world.task(task).plan
    assert plan is not None
    assert (plan.rung, plan.memory_mib) == ("again", 18 * GIB + BLOCK_MIB + 1_024), "27 GiB would have been alone"


def test_cards_of_different_size() -> None:
    """What is free on the small card is not enough; the ladder leads on to the large one."""
    world = World([16 * GIB, 80 * GIB], rules=OPEN)
    large = world.submit(70 * GIB)
    launch(world, large)
    world.wait(1)
    task = world.submit(4 * GIB)
    grow(world, task, 23 * GIB)
    world.settle()
    world.wait(70)
    grow(world, task, 23 * GIB)
    attempt = world.task(task).attempts[-1]
    assert (world.gpus_of(task), attempt.placement.booking.cap_mib) == ((0,), 16 * GIB)
    world.end(large)
    world.settle()
    world.wait(70)
    assert until_over(world, task, 23 * GIB) == 3
    assert world.gpus_of(task) == (1,)


def test_a_task_that_tells_all_it_needs_at_once_books_that() -> None:
    world = World(1, rules=OPEN)
    task = world.submit(4 * GIB)
    assert until_over(world, task, 20 * GIB, block_mib=20 * GIB) == 2
    assert world.task(task).attempts[1].placement.booking.memory_mib == 21 * GIB
    plan = world.task(task).plan
    assert plan is not None
    assert "21.0 GiB" in plan.reason
