"""Estimates in a real daemon: a user's slow estimates delay no other user, and bookings follow observed memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carma.client import Client
from tests.harness import Daemon, daemon_at_rest, python_path, request, somebody_else, until, virtual

PATIENT = {"memory__wait_s": 3600.0}  # no task starts before its estimate is there
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# Answers when a file with the task's name is there, and notes who was asked.
SLOW = """
import time
from pathlib import Path

from carma.core.model.values import Estimate

class Slow:
    name = "slow"

    def __init__(self, folder):
        self.folder = folder

    def estimate(self, request):
        name = request.spec.name
        with (self.folder / "asked").open("a") as asked:
            asked.write(f"{name}\\n")
        while not (self.folder / name).exists():
            time.sleep(0.01)
        return Estimate(footprint_mib=1000, upper_mib=6000, source=self.name, level=0.99, parts_mib={"weights": 600},
                        warnings=("seen in a dream",))

def make(context):
    return Slow(Path(__file__).parent)
"""


def install(daemon: Daemon) -> Path:
    """A package with an estimator, on the daemon's path alone; the folder where its gates are opened."""
    site = daemon.home / "site"
    information = site / "slow_estimator-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-estimator\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[carma.estimators]\nslow = slow_estimator:make\n")
    (site / "slow_estimator.py").write_text(SLOW)
    daemon.environ["PYTHONPATH"] = python_path(site)
    return site


def asked(site: Path) -> list[str]:
    file = site / "asked"
    return file.read_text().split() if file.exists() else []


def names(client: Client) -> dict[str, str]:
    return {task.name: task.state for task in client.tasks(user="all")}


@needs_root
def test_a_slow_estimate_of_one_user_does_not_hold_up_another() -> None:
    settings = {"memory__sources": "declared,history,slow", "memory__estimators_at_once": 1, **PATIENT}
    with daemon_at_rest(gpus=2, **settings) as daemon:
        site = install(daemon)
        daemon.home.chmod(0o755)
        daemon.start()
        for name in ("first", "second", "third"):
            daemon.submit("true", name=name)
        until(lambda: asked(site) == ["first"], "the only place is taken")
        with somebody_else(daemon) as client:
            quick = client.submit(request("true", directory="/", name="quick", gpu_memory_mib=100)).ids[0]
            assert client.wait(quick, 60).outcome == {"kind": "succeeded"}  # what is declared waits for no trial
            client.submit(request("true", directory="/", name="theirs"))
            until(lambda: "waits for the one place" in client.tasks(user="all")[-1].reason, "it waits for a place")
        assert "a trial run since" in daemon.client.task(1).reason
        assert names(daemon.client)["second"] == "estimating"
        for name in ("first", "theirs", "second", "third"):
            (site / name).touch()
        until(lambda: len(asked(site)) == 4, "all were asked about")
        assert asked(site) == ["first", "theirs", "second", "third"]


def test_a_task_that_is_cancelled_while_it_is_estimated_gives_its_place_to_the_next() -> None:
    settings = {"memory__sources": "slow", "memory__estimators_at_once": 1, **PATIENT}
    with daemon_at_rest(gpus=1, **settings) as daemon:
        site = install(daemon)
        daemon.start()
        first = daemon.submit("true", name="first")
        second = daemon.submit("true", name="second")
        until(lambda: asked(site) == ["first"], "the place is taken")
        daemon.client.cancel(first)
        (site / "second").touch()
        assert daemon.wait(second).outcome == {"kind": "succeeded"}


def test_what_was_being_estimated_is_asked_again_after_a_restart() -> None:
    with daemon_at_rest(gpus=1, memory__sources="slow", **PATIENT) as daemon:
        site = install(daemon)
        daemon.start()
        task = daemon.submit("true", name="task")
        until(lambda: asked(site) == ["task"], "it is asked about")
        assert daemon.stop() == 0
        (site / "task").touch()
        daemon.start()
        assert daemon.wait(task).outcome == {"kind": "succeeded"}
        assert asked(site) == ["task", "task"]


def test_the_booking_shrinks_once_the_task_has_settled_and_show_tells_it_all() -> None:
    fast = {"virtual__speed": 20, "monitor__period_s": 0.05, "memory__sources": "slow"}
    with daemon_at_rest(gpus=1, memory_mib=16_384, **fast) as daemon:
        site = install(daemon)
        (site / "task").touch()
        daemon.start()
        task = daemon.submit(*virtual(2_000, 36_000), name="task")
        until(lambda: daemon.client.task(task).booking_mib == 2_256, "the booking has shrunk")
        view = daemon.client.task(task)
        assert view.attempts[0].placed_mib == 6_000
        assert view.estimate is not None
        assert (view.estimate.level, view.estimate.parts_mib) == (0.99, {"weights": 600})
        story = [line.text for line in daemon.client.story(task)]
        assert "attempt 1: booking 5.9 GiB → 2.2 GiB: its memory had settled at 2.0 GiB" in story
        assert daemon.client.gpus()[0].booked_mib == 2_256
        daemon.client.cancel(task)
        daemon.wait(task)


def test_a_task_starts_on_an_idle_gpu_while_it_is_estimated_and_books_the_answer_when_it_comes() -> None:
    settings = {"memory__sources": "declared,slow", "memory__wait_s": 0.0, "memory__shrink": False}
    with daemon_at_rest(gpus=1, memory_mib=16_384, **settings) as daemon:
        site = install(daemon)
        daemon.start()
        first = daemon.submit(*virtual(2_000, 36_000), name="first")
        second = daemon.submit("true", name="second")
        until(lambda: daemon.client.task(first).state == "running", "it does not wait")
        assert daemon.client.task(first).estimate is None
        known = daemon.submit(*virtual(1_000, 36_000), name="known", gpu_memory_mib=2_000)
        until(lambda: daemon.client.task(known).reason_code == "WarmUp", "a task of unknown size closes the GPU")
        assert daemon.client.task(second).state == "estimating", "the GPU is in use"
        (site / "first").touch()
        until(lambda: daemon.client.task(known).state == "running", "the size is known")
        (attempt,) = daemon.client.task(first).attempts
        assert (attempt.booking_mib, attempt.booking_source) == (6_000, "slow")
        (site / "second").touch()
        for task in (first, known):
            daemon.client.cancel(task)
            daemon.wait(task)
        daemon.wait(second)


def test_a_task_that_ends_before_its_estimate_is_remembered_with_its_fingerprint() -> None:
    settings = {
        "memory__sources": "history,slow",
        "memory__wait_s": 0.0,
        "virtual__speed": 20,
        "monitor__period_s": 0.05,
    }
    with daemon_at_rest(gpus=1, **settings) as daemon:
        site = install(daemon)
        daemon.start()
        command = virtual(2_000, 60)
        first = daemon.submit(*command, name="first")
        assert daemon.wait(first).outcome == {"kind": "succeeded"}
        second = daemon.submit(*command, name="second")
        until(lambda: daemon.client.task(second).state in ("running", "finished"), "it has started")
        found = daemon.client.task(second).estimate
        assert found is not None
        assert found.source == "history"
        assert asked(site) == ["first"]
        daemon.wait(second)
