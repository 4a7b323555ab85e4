"""The ladder after an OOM, rung by rung, and what is never retried."""

from __future__ import annotations

import pytest

from carma.core.model.events import RecoveryPlanned, TaskRetried
from carma.core.model.outcome import Failed, Lost, Outcome, OutOfMemory, Succeeded
from carma.core.model.settings import PlacementRules, RecoveryRules, Rules
from carma.core.model.status import Finished, Queued, Recovering
from carma.testing.builders import World
from tests.unit.core.recovery_world import back, given_up, plan


def test_the_ladder_from_the_first_retry_to_giving_up_with_the_story() -> None:
    world = World(2)
    task = world.run(5_000, holds_mib=4_800)
    world.oom(task, asked_mib=3_000, peak_mib=4_800)
    world.settle()
    first = plan(world, task)
    assert (first.rung, first.memory_mib) == ("again", 4_800 + 3_000 + 1_024)
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
    assert "40.0 GiB" in told.no_retry


def test_the_next_attempt_goes_where_what_it_needs_fits() -> None:
    """It does not go to an empty GPU: published, waiting for one cost 2,330 s and the crash 23 s."""
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
    assert why.sentence.startswith("back in the queue in 2 s: held 4.9 GiB and requested 100 MiB more")


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
    told = f"no retries left ({retries} of {retries} used)" if retries else "retries are off for this task"
    assert f"{told}; the last attempt had" in given_up(world, task).no_retry


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
    assert given_up(world, gang).where == "gpu"


def test_a_card_that_is_not_in_the_list_is_no_hope() -> None:
    world = World([40_960, 81_920], rules=Rules(placement=PlacementRules(gpus=("0",))))
    task = world.run(30_000, exclusive=True)
    world.oom(task, asked_mib=20_000, peak_mib=30_000)
    world.settle()
    assert "40.0 GiB" in given_up(world, task).no_retry


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


def test_a_cancelled_task_does_not_come_back() -> None:
    world = World(1)
    task = world.run(5_000)
    world.stop(task)
    world.oom(task)
    world.settle()
    status = world.task(task).status
    assert isinstance(status, Finished)
    assert status.outcome.__struct_config__.tag == "cancelled"


ALONE = Rules(recovery=RecoveryRules(mode="alone"))


def test_by_the_published_rule_a_task_comes_back_alone_at_once_and_before_the_others() -> None:
    world = World(1, rules=ALONE)
    other = world.run(10_000, time_limit_s=9_000.0)
    older = world.submit(20_000, exclusive=True)
    task = world.run(5_000, holds_mib=4_800, time_limit_s=60.0)
    world.oom(task, asked_mib=3_000, peak_mib=4_800)
    world.settle()
    planned = plan(world, task)
    assert (planned.rung, planned.memory_mib, planned.first) == ("alone", 4_800 + 3_000 + 1_024, True)
    back(world, task)
    world.end(other)
    world.wait(2)
    world.settle()
    assert world.placed(task)
    assert world.task(task).attempts[-1].placement.booking.alone
    assert not world.placed(older)


def test_by_the_published_rule_a_task_waits_for_an_idle_gpu_however_much_room_there_is_beside_others() -> None:
    world = World(1, rules=ALONE)
    world.run(10_000)
    task = world.submit(5_000)
    world.settle()
    world.start(task, mib=4_800)
    world.wait(30)
    world.oom(task, asked_mib=3_000, peak_mib=4_800)
    world.settle()
    back(world, task)
    assert not world.placed(task)
    assert world.why(task).code == "Exclusive"


def test_by_the_published_rule_an_innocent_victim_too_comes_back_alone() -> None:
    world = World(1, rules=ALONE)
    glutton = world.run(10_000)
    task = world.run(5_000, holds_mib=4_000)
    world.memory[world.state.active[glutton]] = 35_900
    world.wait(2)
    world.oom(task, asked_mib=500, peak_mib=4_000)
    world.settle()
    assert world.task(task).attempts[-1].blame == "neighbour"
    planned = plan(world, task)
    assert (planned.rung, planned.first) == ("alone", True)
    assert planned.reason.endswith("first in the queue, alone on a GPU (recovery.mode is alone)")
