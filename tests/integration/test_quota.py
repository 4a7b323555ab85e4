"""Quotas and users' accounts with a real daemon and real processes: at submission, at the start, over a kill -9."""

from __future__ import annotations

import pytest

from carma import errors
from carma.wire.report_types import UserView
from tests.harness import Daemon, serving, until

LONG = ("sh", "-c", "sleep 600")


def me(daemon: Daemon) -> UserView:
    """The row of the user who runs the daemon and the tests."""
    name = daemon.client.server().user
    return next(user for user in daemon.client.users() if user.user == name)


def test_a_task_at_the_quota_waits_with_its_reason_until_another_ends() -> None:
    with serving(gpus=2, quota__running="1", quota__waiting="default=2") as daemon:
        first = daemon.submit(*LONG, gpu_memory_mib=100)
        daemon.until_state(first, "running")
        second = daemon.submit("true", gpu_memory_mib=100)
        third = daemon.submit("true", gpu_memory_mib=100)
        until(lambda: daemon.client.task(second).state == "queued", "it is estimated")
        waits = daemon.client.task(second)
        name = daemon.client.server().user
        assert (waits.reason_code, waits.reason) == (
            "Quota",
            f"user {name} runs 1 of 1 task (quota.running; an administrator can raise it)",
        )
        with pytest.raises(errors.QuotaReached, match="2 of 2 waiting tasks"):
            daemon.submit("true")
        user = me(daemon)
        assert (user.running, user.running_limit, user.waiting, user.waiting_limit) == (1, 1, 2, 2)
        daemon.client.cancel(first)
        for task in (second, third):
            assert daemon.wait(task).outcome == {"kind": "succeeded"}


def test_what_a_user_had_survives_a_kill_and_is_counted_once() -> None:
    with serving(gpus=1, virtual__speed=3600.0, fairness__enabled="yes", fairness__half_life_s="1000d") as daemon:
        task = daemon.submit(*LONG, gpu_memory_mib=8192)
        daemon.until_state(task, "running")
        until(lambda: me(daemon).memory_h > 1.0, "an hour of the card was held")
        daemon.client.cancel(task)
        daemon.wait(task)
        before = me(daemon)
        assert before.memory_h > 1.0
        for _ in range(2):  # the second time from what the first start has saved
            daemon.kill()
            daemon.start()
            after = me(daemon)
            assert (after.running, after.waiting) == (0, 0)
            assert after.memory_h == pytest.approx(before.memory_h, rel=0.01)
