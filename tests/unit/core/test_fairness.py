"""Accounts fade and add up; users take turns by them; priority comes before any share."""

from __future__ import annotations

import msgspec
import pytest

from carma.core.machine import step
from carma.core.model.events import GpusFound
from carma.core.model.settings import FairnessRules, QueueRules, Rules, WarmUp
from carma.core.model.values import GpuId, Owner, TaskId
from carma.core.policies import exclusive, magm
from carma.core.ports import Checkpoint
from carma.core.scheduling.explanation import explain, try_now
from carma.core.scheduling.fairness import CARD
from carma.core.scheduling.queue_order import queued_ids
from carma.core.state import State
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.testing.builders import ALICE, BOB, World, gpu
from carma.testing.invariants import validate

CAROL = Owner(1003, 1003, "carol")
HOUR_S, DAY_S = 3600.0, 86_400.0


def fair(**fairness: object) -> Rules:
    return Rules(fairness=FairnessRules(enabled=True, **fairness), warmup=WarmUp(enabled=False))  # type: ignore[arg-type]


def world(gpus: int = 1, **fairness: object) -> World:
    return World(gpus, rules=fair(**fairness), policy=exclusive.POLICY)


def used(world: World, owner: Owner) -> tuple[float, float]:
    accounts = world.state.accounts
    return accounts.usage(accounts.by_uid[owner.uid], world.now)


def hold(world: World, owner: Owner, hours: float, mib: int = 40_960) -> None:
    """One task of that user, for this time."""
    task = world.submit(mib, owner=owner)
    world.settle()
    world.start(task, mib=100)
    world.now += hours * HOUR_S
    world.end(task)
    world.sample()
    world.settle()


def line(world: World) -> list[TaskId]:
    return list(queued_ids(world.state, world.now))


# -- accounts ---------------------------------------------------------------------------------------------------------
def test_memory_counts_as_the_share_of_a_card_that_was_booked() -> None:
    made = world(half_life_s=1e12)
    hold(made, ALICE, 2.0, mib=10_240)
    assert used(made, ALICE)[0] == pytest.approx(0.5)


def test_one_that_is_alone_on_its_gpus_holds_all_of_them() -> None:
    made = World(2, rules=fair(half_life_s=1e12))
    task = made.submit(1_000, gpus=2, exclusive=True)
    made.settle()
    made.now += HOUR_S
    made.end(task)
    assert used(made, ALICE)[0] == pytest.approx(2.0)
    assert made.state.accounts.held(ALICE.uid).tasks == 0


def test_usage_of_a_half_life_ago_counts_half_however_often_it_is_read() -> None:
    quiet, busy = world(half_life_s=DAY_S), world(half_life_s=DAY_S)
    for made in (quiet, busy):
        hold(made, ALICE, 1.0)
    before = used(quiet, ALICE)[0]
    quiet.now += DAY_S
    for _ in range(24):
        busy.now += HOUR_S
        busy.submit(1, owner=BOB, held=True)  # all accounts are counted up to each of these
    assert used(quiet, ALICE)[0] == pytest.approx(before / 2)
    assert used(busy, ALICE)[0] == pytest.approx(before / 2)


def test_what_is_held_for_ever_comes_to_the_half_life_over_ln_2() -> None:
    made = world(half_life_s=DAY_S)
    hold(made, ALICE, 24.0 * 60)
    assert used(made, ALICE)[0] == pytest.approx(24.0 / 0.693147, rel=1e-4)


def test_a_booking_that_shrinks_counts_less_from_then_on() -> None:
    made = World(1, rules=fair(half_life_s=1e12))
    task = made.submit(20_480, source="trace")
    made.settle()
    made.start(task, mib=5_000)
    made.wait(30.0)
    made.settle()
    booked = made.task(task).attempts[-1].placement.booking.memory_mib
    assert booked < 20_480
    before = used(made, ALICE)[0]
    made.now += HOUR_S
    assert used(made, ALICE)[0] - before == pytest.approx(booked / 40_960, rel=1e-3)


def test_what_a_task_holds_is_counted_on_the_gpus_as_they_are_when_more_is_known_of_it() -> None:
    made = World(1, rules=fair())
    task = made.submit(20_480)
    made.settle()
    made.start(task, mib=1_000)
    made.emit(GpusFound(made.now, (gpu(0, 81_920),)))
    assert made.state.accounts.held(ALICE.uid).cards == CARD // 2
    made.wait(1.0)
    made.settle()  # its memory is stored: it runs as before
    assert made.state.accounts.held(ALICE.uid).cards == CARD // 4


def test_sm_activity_counts_when_the_attempt_has_ended() -> None:
    made = world(half_life_s=1e12)
    made.activity[GpuId("GPU-0")] = (0.5, 0.1, 0.1)
    task = made.submit(1_000)
    made.settle()
    made.start(task)
    made.wait(600.0)
    assert used(made, ALICE)[1] == 0.0
    made.end(task)
    seen = made.task(task).attempts[-1]
    assert seen.activity is not None
    assert seen.activity.sm_active is not None
    assert used(made, ALICE)[1] == pytest.approx(seen.activity.sm_active * seen.used_s / HOUR_S)
    assert used(made, ALICE)[1] == pytest.approx(0.5 * 600 / HOUR_S, rel=0.05)


def test_an_account_with_nothing_left_in_it_is_dropped() -> None:
    made = world(half_life_s=60.0)
    hold(made, ALICE, 1.0)
    made.now += DAY_S
    made.submit(1, owner=BOB)
    assert set(made.state.accounts.by_uid) == {BOB.uid}


def test_a_restart_keeps_the_accounts_and_the_order() -> None:
    made = world(2, shares={"bob": 2.0})
    for owner, hours in ((ALICE, 3.0), (BOB, 5.0), (CAROL, 1.0)):
        hold(made, owner, hours)
    for owner in (ALICE, BOB, CAROL) * 4:
        made.submit(40_000, owner=owner)
    made.settle()
    made.now += 1234.5
    made.submit(1, owner=BOB)
    saved, _ = checkpoint(made.state, 7)
    stored = msgspec.json.decode(msgspec.json.encode(saved), type=Checkpoint)
    again = restore(made.state.rules, made.state.policy, stored)
    assert not validate(again)
    assert list(queued_ids(again, made.now)) == line(made)
    for kept, one in zip(again.accounts.saved(made.now), made.state.accounts.saved(made.now), strict=True):
        assert (kept.uid, kept.name) == (one.uid, one.name)
        assert kept.memory_h == pytest.approx(one.memory_h)
    assert [one.name for one in stored.usage] == ["alice", "bob", "carol"]


def test_a_checkpoint_of_an_older_version_has_no_usage() -> None:
    old = msgspec.json.decode(b'{"sequence": 1, "at": 5.0, "tasks": []}', type=Checkpoint)
    assert not restore(fair(), magm.POLICY, old).accounts.by_uid


def test_a_replay_of_the_log_gives_the_same_order() -> None:
    made = world(2)
    for owner in (ALICE, ALICE, ALICE, BOB, CAROL) * 6:
        made.submit(30_000, owner=owner)
        made.settle()
        made.now += 700.0
        if made.now % 3 < 1 and made.state.active:
            made.end(next(iter(made.state.active)))
    again = State(made.state.rules, made.state.policy)
    for event in made.log:
        step(again, event)
    assert list(queued_ids(again, made.now)) == line(made)
    assert again.accounts.saved(made.now) == made.state.accounts.saved(made.now)


# -- turns ------------------------------------------------------------------------------------------------------------
def test_without_fairness_the_first_to_come_is_the_first_to_go() -> None:
    made = World(1, policy=exclusive.POLICY)
    ids = [made.submit(40_000, owner=owner) for owner in (ALICE, ALICE, ALICE, BOB)]
    assert line(made) == ids


def test_users_who_had_nothing_alternate() -> None:
    made = world()
    a = [made.submit(40_000) for _ in range(3)]
    b = [made.submit(40_000, owner=BOB) for _ in range(3)]
    assert line(made) == [a[0], b[0], a[1], b[1], a[2], b[2]]


def test_who_asks_for_half_as_much_gets_two_turns() -> None:
    made = World(1, rules=fair())
    a = [made.submit(32_000) for _ in range(2)]
    b = [made.submit(16_000, owner=BOB) for _ in range(4)]
    assert line(made) == [a[0], b[0], b[1], a[1], b[2], b[3]]


def test_a_share_of_two_gets_two_turns() -> None:
    made = world(shares={"bob": 2.0})
    a = [made.submit(40_000) for _ in range(2)]
    b = [made.submit(40_000, owner=BOB) for _ in range(4)]
    assert line(made) == [a[0], b[0], b[1], a[1], b[2], b[3]]


def test_who_had_more_waits_until_the_other_has_caught_up() -> None:
    made = world(half_life_s=1e12)
    hold(made, ALICE, 2.5)
    a = [made.submit(40_960) for _ in range(2)]
    b = [made.submit(40_960, owner=BOB) for _ in range(4)]
    # Alice had 2.5 hours of a card's memory; a task is thought to take an hour of it, and one of its SMs.
    assert line(made) == [b[0], b[1], a[0], b[2], a[1], b[3]]


def test_what_a_user_holds_counts_at_once() -> None:
    made = world(2)
    ids = [made.submit(40_000) for _ in range(4)]
    made.settle()
    assert set(made.state.active) == set(ids[:2])
    late = made.submit(40_000, owner=BOB)
    assert line(made) == [late, *ids[2:]]


def test_priority_goes_before_any_share() -> None:
    made = world()
    hold(made, ALICE, 50.0)
    low = made.submit(40_000, owner=BOB)
    high = made.submit(40_000, owner=ALICE, priority=1)
    assert line(made) == [high, low]


def test_turns_taken_with_priority_are_counted_below_it() -> None:
    made = world()
    high = made.submit(40_000, owner=ALICE, priority=1)
    a = made.submit(40_000, owner=ALICE)
    b = made.submit(40_000, owner=BOB)
    assert line(made) == [high, b, a]


def test_what_cannot_have_its_turn_costs_its_user_nothing() -> None:
    made = world()
    waits = [made.submit(40_000, begin_at=made.now + 1e6) for _ in range(5)]
    a = made.submit(40_000)
    b = made.submit(40_000, owner=BOB)
    assert [task for task in line(made) if task not in waits] == [a, b]


def test_the_place_of_a_task_that_is_not_in_the_queue_yet_is_known() -> None:
    made = World(1, rules=msgspec.structs.replace(fair(), queue=QueueRules(backfill_depth=0)), policy=exclusive.POLICY)
    for _ in range(4):
        made.submit(40_000)
    made.settle()
    bobs = msgspec.structs.replace(made.task(TaskId(2)), id=TaskId(0), owner=BOB)
    assert try_now(made.state, bobs, made.now).code == "Exclusive"  # its turn it would be
    told = try_now(made.state, msgspec.structs.replace(bobs, owner=ALICE), made.now)
    assert (told.code, told.reason) == ("Priority", "3 tasks are before it in the queue")


def test_the_fence_is_for_the_first_in_the_new_order() -> None:
    made = World(2, rules=fair(), policy=exclusive.POLICY)
    hold(made, ALICE, 5.0)
    made.submit(40_000, owner=CAROL)
    made.settle()
    made.start()
    gang_of_alice = made.submit(40_000, gpus=2)
    gang_of_bob = made.submit(40_000, gpus=2, owner=BOB)
    assert line(made) == [gang_of_bob, gang_of_alice]
    made.settle()
    assert "should start in" in made.why(gang_of_bob).sentence
    assert "should start in" not in made.why(gang_of_alice).sentence
    assert explain(made.state, gang_of_bob, made.now).placement is None


def test_reasons_and_decisions_go_by_the_same_order() -> None:
    rules = msgspec.structs.replace(fair(), queue=QueueRules(backfill_depth=1))
    made = World(1, rules=rules, policy=exclusive.POLICY)
    a = [made.submit(40_000) for _ in range(4)]
    b = [made.submit(40_000, owner=BOB) for _ in range(2)]
    made.settle()
    assert line(made) == [b[0], a[1], b[1], a[2], a[3]]
    assert made.why(a[3]).sentence.startswith("4 tasks are before it")
