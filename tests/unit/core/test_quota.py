"""Quotas: what keeps a user's task waiting, whom it holds up, and what is refused at submission."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carma import errors
from carma.config import settings_of
from carma.core.model.settings import FairnessRules, QuotaRules, Rules, WarmUp
from carma.core.model.values import TaskId
from carma.core.policies import exclusive
from carma.core.scheduling.explanation import explain
from carma.core.scheduling.fairness import Held
from carma.core.scheduling.quota import Limits, limits_of, quota_stop
from carma.testing.builders import BOB, World
from carma.wire.api_types import ArrayAsk
from tests.unit.daemon.api_server import ALICE as ALICE_UID
from tests.unit.daemon.api_server import BOB as BOB_UID
from tests.unit.daemon.api_server import Served, serving


def world(count: int = 4, /, *, fair: bool = False, **quota: object) -> World:
    rules = Rules(
        quota=QuotaRules(**quota),  # type: ignore[arg-type]
        fairness=FairnessRules(enabled=fair),
        warmup=WarmUp(enabled=False),
    )
    return World(count, rules=rules, policy=exclusive.POLICY)


def test_by_name_else_by_default_else_none() -> None:
    rules = QuotaRules(running={"default": 2, "anna": 5}, gpus={"anna": 4})
    assert limits_of(rules, "anna") == Limits(running=5, gpus=4, waiting=20_000)
    assert limits_of(rules, "otto") == Limits(running=2, waiting=20_000)


AT_LIMIT = "user alice holds 2 of 2 GPUs (quota.gpus; an administrator can raise it)"


@pytest.mark.parametrize(
    ("waiting", "anna", "otto"),
    [({}, 20_000, 20_000), ({"anna": 5}, 5, 20_000), ({"default": 7}, 7, 7), ({"default": 10**9, "anna": 0}, 0, 10**9)],
)
def test_every_user_has_a_limit_of_waiting_tasks(waiting: dict[str, int], anna: int, otto: int) -> None:
    rules = QuotaRules(waiting=waiting)
    assert (limits_of(rules, "anna").waiting, limits_of(rules, "otto").waiting) == (anna, otto)


@pytest.mark.parametrize(
    ("limits", "held", "wanted", "sentence"),
    [
        (Limits(), Held(99, 99, 10**6), Held(1, 8, 10**6), None),
        (Limits(running=2), Held(1), Held(1), None),
        (
            Limits(running=2),
            Held(2),
            Held(1),
            "user anna runs 2 of 2 tasks (quota.running; an administrator can raise it)",
        ),
        (Limits(gpus=4), Held(3, 3), Held(1, 1), None),
        (
            Limits(gpus=4),
            Held(4, 4),
            Held(1, 1),
            "user anna holds 4 of 4 GPUs (quota.gpus; an administrator can raise it)",
        ),
        (
            Limits(gpus=4),
            Held(3, 3),
            Held(1, 2),
            "user anna holds 3 of 4 GPUs, and this asks for 2 (quota.gpus; an administrator can raise it)",
        ),
        (
            Limits(gpus=4),
            Held(),
            Held(1, 8),
            "asks for 8 GPUs, and user anna may hold 4 (quota.gpus; an administrator can raise it)",
        ),
        (Limits(memory_share=0.5), Held(1, 1, 10_240), Held(1, 1, 10_240), None),
        (
            Limits(memory_share=0.5),
            Held(1, 1, 10_240),
            Held(1, 1, 12_288),
            "user anna has 10.0 GiB of 20.0 GiB of GPU memory booked, and this asks for 12.0 GiB "
            "(quota.memory_share; an administrator can raise it)",
        ),
        (Limits(memory_share=0.1), Held(), Held(1, 1, 12_288), None),  # a user with nothing may have one task
    ],
)
def test_the_sentence_has_the_numbers(limits: Limits, held: Held, wanted: Held, sentence: str | None) -> None:
    stop = quota_stop(limits, "anna", held, wanted, total_mib=40_960)
    assert (None if stop is None else stop.sentence) == sentence


@pytest.mark.parametrize("fair", [False, True])
def test_a_quota_that_is_reached_is_a_reason_and_holds_up_nobody_else(fair: bool) -> None:
    made = world(4, fair=fair, gpus={"default": 2})
    a = [made.submit(40_000) for _ in range(5)]
    b = made.submit(40_000, owner=BOB)
    made.settle()
    assert set(made.state.active) == {a[0], a[1], b}
    for task in a[2:]:
        assert (made.why(task).code, made.why(task).sentence) == ("Quota", AT_LIMIT)
    decision = explain(made.state, a[2], made.now)
    assert (decision.code, decision.reason, decision.placement) == ("Quota", AT_LIMIT, None)
    made.end(a[0])
    made.sample()
    made.settle()
    assert a[2] in made.state.active


def test_tasks_of_a_user_do_not_overtake_one_of_theirs_that_is_at_the_quota() -> None:
    made = world(8, gpus={"default": 4})
    first = [made.submit(40_000) for _ in range(3)]
    made.settle()
    large = made.submit(40_000, gpus=2)
    small = made.submit(40_000)
    made.settle()
    assert set(made.state.active) == set(first)
    assert (
        made.why(large).sentence
        == "user alice holds 3 of 4 GPUs, and this asks for 2 (quota.gpus; an administrator can raise it)"
    )
    assert made.why(small).code == "Quota"
    assert made.why(small).sentence == f"task {large} of user alice is before it, and at a quota"
    made.end(first[0])
    made.sample()
    made.settle()
    assert large in made.state.active


def test_a_task_beyond_the_quota_for_good_holds_up_none_of_its_user() -> None:
    """It was submitted when the quota was larger."""
    made = world(8, gpus={"default": 4})
    never = made.submit(40_000, gpus=5)
    after = made.submit(40_000)
    made.settle()
    assert after in made.state.active
    assert (
        made.why(never).sentence
        == "asks for 5 GPUs, and user alice may hold 4 (quota.gpus; an administrator can raise it)"
    )


def test_one_pass_does_not_give_more_than_the_quota() -> None:
    made = world(4, running={"alice": 3})
    tasks = [made.submit(40_000) for _ in range(4)]
    made.settle()
    assert len(made.state.active) == 3
    assert made.why(tasks[3]).sentence == "user alice runs 3 of 3 tasks (quota.running; an administrator can raise it)"


def test_memory_that_is_booked_counts_and_what_shrinks_is_given_back() -> None:
    made = World(2, rules=Rules(quota=QuotaRules(memory_share={"default": 0.25})))
    first = made.submit(15_000, source="trace")
    made.settle()
    made.start(first, mib=4_000)
    second = made.submit(10_000, source="trace")
    made.settle()
    assert made.why(second).code == "Quota"
    made.wait(30.0)
    made.settle()  # the booking shrinks to what was seen of the task
    assert second in made.state.active


def test_a_quota_does_not_hold_back_one_that_waits_for_something_else() -> None:
    made = world(4, gpus={"default": 1})
    later = made.submit(40_000, begin_at=made.now + 1e5)
    now = made.submit(40_000)
    made.settle()
    assert set(made.state.active) == {now}
    assert made.why(later).code == "BeginTime"


# -- at submission ----------------------------------------------------------------------------------------------------
@pytest.fixture
def served() -> Iterator[Served]:
    settings = settings_of(
        {
            "quota.waiting": "default=2,bob=3",
            "quota.gpus": "default=2",
            "quota.running": {"carol": 0},
            "daemon.admins": [],
        }
    )
    with serving(settings=settings, own_uid=0, gpus=4) as made:
        yield made


def test_one_more_than_may_wait_is_refused_with_what_to_do(served: Served) -> None:
    alice = served.client(ALICE_UID)
    for _ in range(2):
        alice.submit(served.request("true"))
    with pytest.raises(errors.QuotaReached) as caught:
        alice.submit(served.request("true"))
    assert str(caught.value) == "user alice has 2 of 2 waiting tasks (quota.waiting)"
    assert caught.value.hint.startswith("wait until some have started, or cancel some")
    assert caught.value.code == "quota"
    served.client(BOB_UID).submit(served.request("true"))
    assert len(served.shell.state.tasks) == 3


def test_an_array_counts_with_all_of_its_tasks(served: Served) -> None:
    bob = served.client(BOB_UID)
    with pytest.raises(errors.QuotaReached, match=r"0 of 3 .* 4 more"):
        bob.submit(served.request("true", array=ArrayAsk(indices=(1, 2, 3, 4))))
    assert len(bob.submit(served.request("true", array=ArrayAsk(indices=(1, 2, 3)))).ids) == 3


def test_what_the_quota_never_allows_is_refused(served: Served) -> None:
    with pytest.raises(errors.QuotaReached, match=r"3 GPUs.*alice.* 2"):
        served.client(ALICE_UID).submit(served.request("true", gpus=3))
    with pytest.raises(errors.QuotaReached, match="no task"):
        served.client(1003).submit(served.request("true"))
    with pytest.raises(errors.QuotaReached):
        served.client(ALICE_UID).submit(served.request("true", gpus=3, dry_run=True))
    assert not served.shell.state.tasks


def test_a_retry_counts_as_one_that_waits(served: Served) -> None:
    alice = served.client(ALICE_UID)
    (task,) = alice.submit(served.request("true")).ids
    served.estimated(task)
    served.end(served.place(task))
    for _ in range(2):
        alice.submit(served.request("true"))
    with pytest.raises(errors.QuotaReached):
        alice.retry(task)


def test_users_are_shown_to_themselves_and_to_administrators(served: Served) -> None:
    alice, bob, root = served.client(ALICE_UID), served.client(BOB_UID), served.client(0)
    (task,) = alice.submit(served.request("true")).ids
    bob.submit(served.request("true"))
    served.estimated(task)
    served.place(task, 0, mib=4_096)
    (own,) = alice.users()
    assert (own.user, own.running, own.gpus, own.booked_mib, own.waiting) == ("alice", 1, 1, 4_096, 0)
    assert (own.gpus_limit, own.waiting_limit, own.running_limit, own.memory_limit_mib) == (2, 2, None, None)
    assert [one.user for one in bob.users()] == ["bob"]
    everybody = root.users()
    assert {one.user for one in everybody} == {"alice", "bob", "root"}
    assert everybody[-1].user == "alice"  # she holds something: her turn comes last
    assert TaskId(task) in served.shell.state.active
