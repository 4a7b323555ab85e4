"""The ladder after an OOM, rung by rung, and what is never retried."""

from __future__ import annotations

from typing import Literal

import pytest

from carma.core.events import AttemptStarted, RecoveryPlanned, StopRequested, TaskRetried
from carma.core.model import Confinement, Guard, TaskId
from carma.core.outcome import Disrupted, Failed, Lost, Outcome, OutOfMemory, Succeeded, describe
from carma.core.settings import PlacementRules, RecoveryRules, Rules
from carma.core.status import Finished, Queued, Recovering
from carma.core.task import Plan
from tests.builders import World


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


def test_the_ladder_from_the_first_retry_to_giving_up_with_the_story() -> None:
    world = World(2)
    task = world.run(5_000, holds_mib=4_800)
    world.oom(task, asked_mib=3_000, peak_mib=4_800)
    world.settle()
    first = plan(world, task)
    assert (first.rung, first.memory_mib) == ("again", 4_800 + 3_000 + 1_024)
    assert first.reason == "held 4.7 GiB and asked for 2.9 GiB more; next attempt where 8.6 GiB fit"
    back(world, task)
    assert world.task(task).attempts[-1].placement.booking.memory_mib == 8_824
    world.start(task, mib=8_800)
    world.wait(2)
    world.oom(task, asked_mib=100, peak_mib=8_800)
    world.settle()
    second = plan(world, task)
    assert (second.rung, second.memory_mib) == ("larger", 13_236), "half as much again, which is more than it asked for"
    back(world, task)
    world.start(task, mib=13_000)
    world.wait(2)
    world.oom(task, asked_mib=9_000, peak_mib=13_000)
    world.settle()
    third = plan(world, task)
    assert (third.rung, third.memory_mib) == ("alone", 13_000 + 9_000 + 1_024)
    back(world, task)
    booking = world.task(task).attempts[-1].placement.booking
    assert (booking.alone, booking.source) == (True, "recovery")
    world.start(task, mib=40_000)
    world.wait(2)
    world.oom(task, asked_mib=9_000, peak_mib=40_000)
    world.settle()
    assert len(world.task(task).attempts) == 4
    told = given_up(world, task)
    assert told.message == "CUDA out of memory; it had a GPU of 40.0 GiB alone, and there is none larger"


def test_the_next_attempt_goes_where_what_it_needs_fits() -> None:
    """Not to an empty GPU: published, waiting for one cost 2,330 s and the crash 23 s."""
    world = World(2)
    large = world.run(30_000)  # GPU 0
    small = world.run(10_000)  # GPU 1
    task = world.submit(5_000)
    world.settle()
    assert world.gpus_of(task) == (1,)
    world.start(task, mib=4_900)
    world.wait(2)
    world.oom(task, asked_mib=6_000, peak_mib=4_900)
    world.settle()
    back(world, task)
    assert world.gpus_of(task) == (1,), "shared: 11.9 GiB fit beside task 2, not beside task 1"
    assert world.placed(large)
    assert world.placed(small)


def test_the_back_off_doubles_up_to_its_limit() -> None:
    rules = Rules(recovery=RecoveryRules(retries=8, backoff_s=2.0, backoff_limit_s=10.0, growth=1.0))
    world = World(1, rules=rules)
    task = world.run(1_000)
    waits = []
    for _ in range(3):
        world.oom(task, asked_mib=None, peak_mib=None)
        events = world.settle()
        planned = next(event for event in events if isinstance(event, RecoveryPlanned))
        waits.append(planned.until - world.now)
        back(world, task)
        world.start(task)
        world.wait(1)
    assert waits == [2.0, 4.0, 8.0]


def test_a_back_off_is_shown_while_it_lasts() -> None:
    world = World(1)
    task = world.run(5_000)
    world.oom(task, asked_mib=100, peak_mib=5_000)
    world.settle()
    why = world.why(task)
    assert why.code == "Recovery"
    assert why.sentence.startswith("back in the queue in 2 s: held 4.9 GiB and asked for 100 MiB more")


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 2), (2, 3)])
def test_a_task_may_bound_its_retries_itself(retries: int, attempts: int) -> None:
    world = World(2)
    task = world.run(1_000, max_oom_retries=retries)
    for _ in range(10):
        if not world.placed(task):
            break
        world.oom(task, asked_mib=500, peak_mib=1_000)
        world.settle()
        if world.outcome(task) is None:
            back(world, task)
            world.start(task)
            world.wait(1)
    assert len(world.task(task).attempts) == attempts
    told = ("once; 0 retries are", "2 times; 1 retry is", "3 times; 2 retries are")[retries]
    assert f"ran out of memory {told} allowed" in given_up(world, task).message


def test_problem_3_there_is_no_endless_relaunch() -> None:
    world = World(4)
    task = world.run(100)
    for _ in range(50):
        if world.outcome(task) is not None:
            break
        if world.placed(task):
            world.oom(task, asked_mib=None)
        world.settle()
        world.wait(70)
        world.settle()
        if world.placed(task):
            world.start(task)
    assert isinstance(world.outcome(task), OutOfMemory)
    assert len(world.task(task).attempts) <= 1 + Rules().recovery.retries


@pytest.mark.parametrize("outcome", [Failed(1), Failed(137), Lost("gone"), OutOfMemory("host", 137), Succeeded()])
def test_problem_4_only_gpu_memory_that_ran_out_is_retried(outcome: Outcome) -> None:
    world = World(1)
    task = world.run(1_000)
    world.end(task, outcome)
    world.settle()
    assert world.outcome(task) == outcome
    assert len(world.task(task).attempts) == 1


# -- blame ------------------------------------------------------------------------------------------------------------
def guilty_and_victim() -> tuple[World, TaskId, TaskId]:
    """On one GPU: a task that holds six times its booking, and one that keeps to its own."""
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
    assert found.reason == "a neighbour held more than its booking; this task kept to its 9.8 GiB and goes first"
    assert world.placed(guilty), "no other task is stopped"
    world.end(guilty)
    world.wait(3)
    world.settle()
    order = [task for task, _ in world.placements()]
    assert order.index(victim, 2) < (order.index(before) if before in order else len(order))
    assert world.task(victim).attempts[-1].placement.booking.memory_mib == 10_000


def test_a_process_over_its_booking_pays_even_if_a_neighbour_is_over_too() -> None:
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


def test_nobody_over_a_booking_is_told_as_not_known() -> None:
    world = World(1)
    task = world.run(5_000, holds_mib=2_000)
    world.oom(task, asked_mib=100, peak_mib=2_000)
    world.settle()
    assert world.task(task).attempts[-1].blame == "unknown"
    assert plan(world, task).memory_mib == 5_000, "never less than it had"


def test_one_whose_first_block_is_refused_is_not_said_to_have_held_anything() -> None:
    world = World(1)
    task = world.run(3_000, holds_mib=0)
    world.oom(task, asked_mib=4_800, peak_mib=0)
    world.settle()
    outcome = world.task(task).attempts[-1].outcome
    assert outcome is not None
    assert describe(outcome) == "out of GPU memory, asked for 4.7 GiB at once"
    assert plan(world, task).reason == "asked for 4.7 GiB at once; next attempt where 5.7 GiB fit"


def test_what_it_asked_for_counts_also_when_nobody_saw_what_it_held() -> None:
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
    assert "a neighbour took the memory 3 times; not tried again" in given_up(world, victim).message
    assert world.placed(guilty)


def test_a_victim_that_wants_no_retry_gets_none() -> None:
    world = World(1)
    world.run(1_000, holds_mib=2_000)
    victim = world.run(5_000, holds_mib=1_000, max_oom_retries=0)
    world.oom(victim, asked_mib=100, peak_mib=1_000)
    world.settle()
    assert "a neighbour took the memory once; not tried again" in given_up(world, victim).message


# -- what the GPUs allow ----------------------------------------------------------------------------------------------
def test_what_fits_on_no_card_goes_alone_at_once() -> None:
    world = World(2)
    task = world.run(20_000)
    world.oom(task, asked_mib=30_000, peak_mib=20_000)
    world.settle()
    assert plan(world, task).rung == "alone"
    back(world, task)
    assert world.task(task).attempts[-1].placement.booking.alone


def test_alone_on_a_small_card_is_followed_by_alone_on_a_larger_one() -> None:
    world = World([24_576, 81_920])
    large = world.run(70_000)
    task = world.run(20_000, exclusive=True)
    assert world.gpus_of(task) == (0,)
    world.oom(task, asked_mib=8_000, peak_mib=20_000)
    world.settle()
    found = plan(world, task)
    assert (found.rung, found.memory_mib) == ("alone", 29_024)
    world.wait(5)
    world.settle()
    assert not world.placed(task), "the small card is free, and too small"
    world.end(large)
    world.wait(1)
    world.settle()
    assert world.gpus_of(task) == (1,)


def test_a_task_that_had_a_small_card_alone_does_not_get_it_again() -> None:
    world = World([24_576, 81_920])
    large = world.run(70_000)
    task = world.run(20_000, exclusive=True)
    world.oom(task, asked_mib=10, peak_mib=20_000)
    world.settle()
    back(world, task)
    assert not world.placed(task), "what it asked for would fit, and did not"
    world.end(large)
    world.settle()
    assert world.gpus_of(task) == (1,)


def test_a_gang_is_not_sent_to_a_card_that_there_is_only_one_of() -> None:
    world = World([81_920, 40_960, 40_960])
    gang = world.run(30_000, gpus=2)
    for _ in range(3):
        if world.outcome(gang) is not None:
            break
        world.oom(gang, asked_mib=20_000, peak_mib=30_000)
        world.settle()
        if world.outcome(gang) is None:
            back(world, gang)
            assert world.placed(gang), world.why(gang)
            world.start(gang)
            world.wait(1)
    assert "there is none larger" in given_up(world, gang).message


def test_a_card_that_is_not_in_the_list_is_no_hope() -> None:
    world = World([40_960, 81_920], rules=Rules(placement=PlacementRules(gpus=("0",))))
    task = world.run(30_000, exclusive=True)
    world.oom(task, asked_mib=20_000, peak_mib=30_000)
    world.settle()
    assert "it had a GPU of 40.0 GiB alone" in given_up(world, task).message


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_a_retry_by_hand_starts_the_count_anew_and_keeps_what_was_learnt() -> None:
    world = World(1)
    task = world.run(5_000, max_oom_retries=1)
    for _ in range(2):
        world.oom(task, asked_mib=1_000, peak_mib=5_000)
        world.settle()
        if world.outcome(task) is None:
            back(world, task)
            world.start(task)
            world.wait(1)
    assert world.outcome(task) is not None
    world.emit(TaskRetried(world.now, task))
    assert isinstance(world.task(task).status, Queued)
    world.settle()
    assert world.task(task).attempts[-1].placement.booking.memory_mib == 5_000 + 1_000 + 1_024
    world.start(task)
    world.wait(1)
    world.oom(task, asked_mib=1_000, peak_mib=7_000)
    world.settle()
    assert isinstance(world.task(task).status, Recovering), "one retry is allowed again"


def test_a_fresh_retry_forgets_what_was_learnt() -> None:
    world = World(1)
    task = world.run(5_000, max_oom_retries=0)
    world.oom(task)
    world.settle()
    world.emit(TaskRetried(world.now, task, fresh=True))
    world.settle()
    assert world.task(task).attempts[-1].placement.booking.memory_mib == 5_000


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


def test_a_cancelled_task_does_not_come_back() -> None:
    world = World(1)
    task = world.run(5_000)
    world.stop(task)
    world.oom(task)
    world.settle()
    status = world.task(task).status
    assert isinstance(status, Finished)
    assert status.outcome.__struct_config__.tag == "cancelled"


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
    assert found.reason == "the MPS server ended; not this task's doing, so it goes first"
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
    reason = "the MPS server ended; ended through no fault of its own 3 times; not tried again"
    assert world.outcome(task) == Disrupted(reason)


def test_one_that_must_not_run_twice_is_not_brought_back_after_a_disruption_either() -> None:
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
