"""The cause of an attempt's end: the attempt itself, a neighbour, or the server that it ran under."""

from __future__ import annotations

from typing import Literal

import pytest

from carma.core.model.events import AttemptStarted, StopRequested, TaskRetried
from carma.core.model.outcome import Disrupted, Failed, describe
from carma.core.model.settings import RecoveryRules, Rules
from carma.core.model.status import Queued, Recovering
from carma.core.model.values import Confinement, Guard, TaskId
from carma.testing.builders import World
from tests.unit.core.recovery_world import back, given_up, plan


def guilty_and_victim() -> tuple[World, TaskId, TaskId]:
    """Two tasks on one GPU: a task that holds six times its booking, and one that keeps to its own."""
    world = World(1)
    guilty = world.run(5_000, holds_mib=30_000)
    world.memory[world.state.active[guilty]] = 4_000
    world.state.tracks[world.state.active[guilty]].peak_mib = 4_000
    world.wait(1)
    victim = world.submit(10_000)
    world.settle()
    world.start(victim, mib=6_000)
    world.memory[world.state.active[guilty]] = 34_000
    world.wait(25)
    return world, guilty, victim


def test_an_innocent_victim_goes_first_with_its_booking_as_it_was() -> None:
    world, guilty, victim = guilty_and_victim()
    before = world.submit(1_000, priority=5)
    world.oom(victim, asked_mib=1_000, peak_mib=6_000)
    world.settle()
    attempt = world.task(victim).attempts[-1]
    assert attempt.blame == "neighbour"
    found = plan(world, victim)
    assert (found.rung, found.first, found.memory_mib) == ("first", True, None)
    assert world.placed(guilty), "no other task is stopped"
    world.end(guilty)
    world.wait(3)
    world.settle()
    order = [task for task, _ in world.placements()]
    assert order.index(victim, 2) < (order.index(before) if before in order else len(order))
    assert world.task(victim).attempts[-1].placement.booking.memory_mib == 10_000


def test_a_process_above_its_booking_is_to_blame_even_if_a_neighbour_is_above_its_own() -> None:
    world, _, victim = guilty_and_victim()
    world.oom(victim, asked_mib=5_000, peak_mib=6_000)  # 11,000 of the 10,000 that were booked
    world.settle()
    assert world.task(victim).attempts[-1].blame == "own"
    assert plan(world, victim).first is False


def test_the_drivers_figure_counts_when_the_frameworks_is_smaller() -> None:
    world = World(1)
    task = world.run(5_000, holds_mib=9_000)
    world.oom(task, asked_mib=100, peak_mib=2_000)  # the framework counts tensors, the driver all of it
    world.settle()
    assert world.task(task).attempts[-1].blame == "own"
    assert plan(world, task).memory_mib == 9_000 + 100 + 1_024


def test_without_a_process_above_its_booking_the_blame_is_unknown() -> None:
    world = World(1)
    task = world.run(5_000, holds_mib=2_000)
    world.oom(task, asked_mib=100, peak_mib=2_000)
    world.settle()
    assert world.task(task).attempts[-1].blame == "unknown"
    assert plan(world, task).memory_mib == 5_000, "never less than it had"


def test_a_task_whose_first_allocation_fails_held_nothing() -> None:
    world = World(1)
    task = world.run(3_000, holds_mib=0)
    world.oom(task, asked_mib=4_800, peak_mib=0)
    world.settle()
    outcome = world.task(task).attempts[-1].outcome
    assert outcome is not None
    assert describe(outcome) == "out of GPU memory, requested 4.7 GiB at once"
    assert "4.7 GiB" in plan(world, task).reason


def test_the_failed_request_counts_even_without_an_observed_peak() -> None:
    world = World(1)
    task = world.submit(3_000)
    world.settle()
    world.start(task)
    world.oom(task, asked_mib=11_500, peak_mib=None)
    world.settle()
    assert (plan(world, task).rung, plan(world, task).memory_mib) == ("larger", 11_500 + 1_024)


@pytest.mark.parametrize(
    ("rung", "held_mib", "blame"),
    [("framework", 4_200, "own"), ("framework", 3_000, "unknown"), ("watchdog", 4_200, "unknown")],
)
def test_a_frameworks_limit_is_reached_below_the_booking_and_is_the_tasks_own(
    rung: Literal["framework", "watchdog"], held_mib: int, blame: str
) -> None:
    """Seen on an H200: booked 11,929 MiB, stopped by PyTorch's own limit when it held 10,834 and asked for 1,022."""
    world = World(1)
    task = world.submit(5_000)
    world.settle()
    guard = Guard(rung=rung, limit_mib=5_000)
    key = world.state.active[task]
    world.emit(AttemptStarted(world.now, key, 7, Confinement(mechanism="timeslice", guards=(guard,))))
    world.memory[key] = held_mib
    world.wait(2)
    world.oom(task, asked_mib=300, peak_mib=held_mib)
    world.settle()
    assert world.task(task).attempts[-1].blame == blame


def test_an_earlier_attempt_of_the_task_itself_is_no_neighbour_to_blame() -> None:
    """It left the GPU a moment ago, above its booking: the retry that fails the same way is not innocent for that."""
    world = World(1, rules=Rules(recovery=RecoveryRules(backoff_s=0.5)))
    task = world.run(5_000, holds_mib=5_000)
    for _ in range(2):
        world.oom(task, asked_mib=4_000, peak_mib=5_000)
        world.settle()
        back(world, task)
        world.start(task, mib=5_000)
        world.wait(1)
    assert [attempt.blame for attempt in world.task(task).attempts[:-1]] == ["own", "unknown"]


def test_innocence_is_bounded_too_and_does_not_count_as_an_own_retry() -> None:
    rules = Rules(recovery=RecoveryRules(innocent_retries=2))
    world = World(1, rules=rules)
    guilty = world.run(1_000, holds_mib=2_000)
    victim = world.run(5_000, holds_mib=1_000)
    for _ in range(3):
        assert world.placed(victim)
        world.oom(victim, asked_mib=100, peak_mib=1_000)
        world.settle()
        if world.outcome(victim) is None:
            back(world, victim)
            world.wait(30)
            world.settle()
            world.start(victim, mib=1_000)
            world.wait(25)
    assert len(world.task(victim).attempts) == 3
    assert "3 times" in given_up(world, victim).no_retry
    assert world.placed(guilty)


def test_a_victim_that_wants_no_retry_gets_none() -> None:
    world = World(1)
    world.run(1_000, holds_mib=2_000)
    victim = world.run(5_000, holds_mib=1_000, max_oom_retries=0)
    world.oom(victim, asked_mib=100, peak_mib=1_000)
    world.settle()
    assert "once" in given_up(world, victim).no_retry


def test_a_victim_that_is_retried_by_hand_does_not_go_first_again() -> None:
    world, guilty, victim = guilty_and_victim()
    world.oom(victim, asked_mib=1_000, peak_mib=6_000)
    world.settle()
    world.stop(victim)
    world.end(guilty)
    world.settle()
    earlier = world.submit(1_000, priority=1, held=True)
    world.emit(TaskRetried(world.now, victim))
    found = plan(world, victim)
    assert found.first is False
    assert isinstance(world.task(earlier).status, Queued)


def disrupt(world: World, task: TaskId) -> None:
    world.emit(StopRequested(world.now, task, Disrupted("the MPS server ended"), 2.0))
    world.end(task, Failed(1, "CUDA error"))
    world.settle()


def test_a_disrupted_task_comes_back_first_and_it_is_not_counted_as_its_oom() -> None:
    world = World(1)
    task = world.run(5_000, max_oom_retries=1)
    disrupt(world, task)
    found = plan(world, task)
    assert (found.rung, found.first, found.memory_mib) == ("first", True, None)
    assert world.task(task).attempts[-1].outcome == Disrupted("the MPS server ended")
    back(world, task)
    assert world.task(task).attempts[-1].placement.booking.memory_mib == 5_000
    world.start(task, mib=6_000)
    world.wait(1)
    world.oom(task, asked_mib=1_000, peak_mib=6_000)
    world.settle()
    assert isinstance(world.task(task).status, Recovering), "its one retry is still there"


def test_what_recovery_had_learnt_survives_a_disruption() -> None:
    world = World(1)
    task = world.run(5_000)
    for peak_mib in (5_000, 20_000, 30_000):
        world.oom(task, asked_mib=3_000, peak_mib=peak_mib)
        world.settle()
        back(world, task)
        world.start(task)
        world.wait(1)
    assert world.task(task).attempts[-1].placement.booking.alone
    learnt = plan(world, task).memory_mib
    disrupt(world, task)
    found = plan(world, task)
    assert (found.rung, found.memory_mib, found.first) == ("alone", learnt, True)
    back(world, task)
    assert world.task(task).attempts[-1].placement.booking.alone


def test_disruptions_end_a_task_in_the_end_with_the_story() -> None:
    world = World(1, rules=Rules(recovery=RecoveryRules(innocent_retries=2)))
    task = world.run(5_000)
    for _ in range(2):
        disrupt(world, task)
        back(world, task)
        world.start(task)
        world.wait(1)
    disrupt(world, task)
    reason = "the MPS server ended; 3 attempts ended without a fault of the task; no further retry"
    assert world.outcome(task) == Disrupted(reason)


def test_a_task_without_retries_is_not_retried_after_a_disruption() -> None:
    world = World(1)
    task = world.run(5_000, max_oom_retries=0)
    disrupt(world, task)
    assert isinstance(world.outcome(task), Disrupted)


def test_a_task_that_the_watchdog_stopped_gets_at_least_what_it_held() -> None:
    world = World(1)
    task = world.run(5_000, holds_mib=20_000)
    world.oom(task, asked_mib=None, peak_mib=20_000)
    world.settle()
    assert (plan(world, task).rung, plan(world, task).memory_mib) == ("larger", 21_024)
