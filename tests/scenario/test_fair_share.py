"""Fair shares: equal users get equal service, within one task, and no user starves, also when users come and go."""

from __future__ import annotations

from math import log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma.core.model.settings import FairnessRules, Rules, WarmUp
from carma.core.model.values import Owner, TaskId
from carma.core.policies import exclusive
from carma.testing.builders import ALICE, BOB, World

HOUR_S = 3600.0
FOR_EVER = 1e12  # a half-life in which nothing fades
FEW = settings(max_examples=40, deadline=None)


def user(number: int) -> Owner:
    return Owner(2000 + number, 2000 + number, f"user{number}")


class Server:
    """Cards that one task has at a time; every user has tasks waiting at any time, user0 very many."""

    def __init__(self, gpus: int, users: int, *, half_life_s: float = FOR_EVER, shares: dict[str, float] | None = None):
        fairness = FairnessRules(enabled=True, half_life_s=half_life_s, shares=shares or {})
        rules = Rules(fairness=fairness, warmup=WarmUp(enabled=False))
        self.world = World(gpus, rules=rules, policy=exclusive.POLICY)
        self.users = [user(number) for number in range(users)]
        self.had_h = dict.fromkeys(self.users, 0.0)
        self.started = dict.fromkeys(self.users, 0)

    def fill(self, owners: list[Owner] | None = None) -> None:
        waiting = self.world.state.accounts.waiting
        for owner in owners or self.users:
            for _ in range((20 if owner == user(0) else 6) - waiting(owner.uid)):
                self.world.submit(40_000, owner=owner)

    def place(self) -> None:
        self.fill()
        before = set(self.world.state.active)
        self.world.settle()
        for task in set(self.world.state.active) - before:
            self.started[self.world.task(task).owner] += 1

    def run(self, task: TaskId, hours: float) -> None:
        """The task ran for this time; then it ends."""
        self.world.now += hours * HOUR_S
        self.had_h[self.world.task(task).owner] += hours
        self.world.end(task)
        self.world.sample()

    def spread(self, of: dict[Owner, float] | dict[Owner, int]) -> float:
        values = [of[owner] for owner in self.users]
        return max(values) - min(values)


@FEW
@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 12), st.randoms(use_true_random=False))
def test_equal_users_start_as_many_equal_tasks_within_one(gpus: int, users: int, rounds: int, dice: Random) -> None:
    server = Server(gpus, users)
    for _ in range(rounds):
        dice.shuffle(server.users)  # who submits first
        server.place()
        assert server.spread(server.started) <= 1
        for place, task in enumerate(sorted(server.world.state.active)):
            server.run(task, 0.0 if place else 1.0)  # all of them at the same time


@FEW
@given(st.integers(2, 4), st.lists(st.floats(0.1, 3.0), min_size=3, max_size=25))
def test_equal_users_get_as_much_time_within_one_task(users: int, lengths: list[float]) -> None:
    server = Server(1, users)
    for hours in lengths:
        server.place()
        (task,) = server.world.state.active
        server.run(task, hours)
        assert server.spread(server.had_h) <= max(lengths) + 1 / 60  # levels are of the last full minute


@FEW
@given(st.lists(st.floats(0.1, 2.0), min_size=20, max_size=30))
@pytest.mark.slow
def test_a_share_of_three_gets_three_times_as_much(lengths: list[float]) -> None:
    server = Server(1, 2, shares={"user1": 3.0})
    for hours in lengths:
        server.place()
        (task,) = server.world.state.active
        server.run(task, hours)
    small, large = (server.had_h[owner] for owner in server.users)
    assert abs(large - 3 * small) <= 3 * (max(lengths) + 1 / 60)


@FEW
@given(st.integers(1, 20), st.integers(1, 3))
@pytest.mark.slow
def test_who_had_the_server_for_days_waits_until_others_had_as_much(days: int, others: int) -> None:
    server = Server(1, 1 + others, half_life_s=24 * HOUR_S)
    last = server.users[0]
    server.fill([last])
    for _ in range(days):
        server.world.settle()
        (task,) = server.world.state.active
        server.run(task, 24.0)
        server.fill([last])
    waited_h = 0.0
    while True:
        server.place()
        (task,) = server.world.state.active
        if server.world.task(task).owner == last:
            break
        server.run(task, 1.0)
        waited_h += 1.0
        # With n others, each of whom gets as much as the next, half-lives until all have had the same: log2(n + 1).
        assert waited_h <= 24.0 * log2(others + 1) + others  # and one task of each


def test_a_large_task_is_not_kept_out_by_many_users_with_small_ones() -> None:
    """The reservation is for the first task in the order of turns. A later user without any use comes after it."""
    server = Server(2, 0)
    world = server.world
    first = [world.submit(40_000, owner=BOB) for _ in range(2)]
    world.settle()
    large = world.submit(40_000, owner=ALICE, gpus=2)
    running, number = list(first), 0
    for _ in range(100):
        number += 1
        world.submit(40_000, owner=user(number))
        world.now += 600.0
        world.end(running.pop(0))
        world.sample()
        world.settle()
        running = sorted(world.state.active)
        if large in running:
            break
    assert large in running
    assert number <= 2 * world.state.rules.queue.overtakes + 2
