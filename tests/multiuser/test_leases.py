"""A user who owns a file can take a lease on it (fcntl F_SETLEASE): any process that opens it waits up to 45 seconds.

While an attempt runs, its output belongs to its submitter. No lease on it may delay the daemon, or other users.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Daemon, until
from tests.multiuser.people import Person
from tests.multiuser.serving import ask_as, attempt_folder, ended, root_daemon, running, shell, until_exists


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    with root_daemon() as daemon:
        yield daemon


def take_leases(paths: list[Path], held: Path) -> Callable[[], None]:
    """Opens these files at once, tries until it has a write lease on each, creates `held`, and keeps the leases."""

    def attack() -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        wanted = [os.open(path, os.O_RDWR) for path in paths]
        held.with_suffix(".opened").touch()
        while wanted:
            with contextlib.suppress(OSError):
                fcntl.fcntl(wanted[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
                wanted.pop()  # stays open
        held.touch()
        signal.pause()

    return attack


def test_a_lease_on_the_output_of_an_ended_attempt_does_not_stop_the_next_daemon(
    own_daemon: Daemon, alice: Person, bob: Person
) -> None:
    daemon, go, held = own_daemon, alice.home / "go", alice.home / "held"
    task, other = shell(alice, daemon, f"echo output; {until_exists(go)}; exit 3"), shell(bob, daemon, "exit 4")
    running(daemon, task)
    folder = attempt_folder(daemon, task)
    daemon.kill()
    with alice.background(take_leases([folder / "stdout.log"], held)):
        until(held.with_suffix(".opened").exists, "alice has opened her output")
        go.touch()
        until(held.exists, "alice has a lease")
        until((folder / "exit.json").exists, "the attempt has ended")
        daemon.start()
        assert (ended(daemon, task).exit_code, ended(daemon, other).exit_code) == (3, 4)
        assert ask_as(alice, daemon, "GET", f"/tasks/{task}/logs").body == b"output\n"


@pytest.fixture
def leased(own_daemon: Daemon, alice: Person) -> Iterator[tuple[int, int]]:
    """A task of Alice whose attempt ended under a runner of an older version, which left the output to her, while no
    daemon ran; and the pid of the process that holds leases on both files."""
    daemon, go, held = own_daemon, alice.home / "go-old", alice.home / "held-old"
    task = shell(alice, daemon, f"echo output; echo error >&2; {until_exists(go)}; exit 3")
    running(daemon, task)
    daemon.kill()
    go.touch()
    folder = attempt_folder(daemon, task)
    until((folder / "exit.json").exists, "the attempt has ended")
    logs = [folder / "stdout.log", folder / "stderr.log"]
    for log in logs:
        alice.own(log, 0o600)
    with alice.background(take_leases(logs, held)) as holder:
        until(held.exists, "alice has the leases")
        daemon.start()
        yield task, holder
    for path in alice.home.glob("*-old*"):
        path.unlink()


def test_the_ends_of_all_tasks_are_recorded_while_a_user_holds_leases(
    own_daemon: Daemon, bob: Person, leased: tuple[int, int]
) -> None:
    assert ended(own_daemon, shell(bob, own_daemon, "exit 4")).exit_code == 4
    assert ended(own_daemon, leased[0]).exit_code == 3


def test_output_on_which_its_owner_holds_a_lease_is_refused_and_sealed_after_the_lease(
    own_daemon: Daemon, alice: Person, leased: tuple[int, int]
) -> None:
    task, holder = leased
    ended(own_daemon, task)
    answer = ask_as(alice, own_daemon, "GET", f"/tasks/{task}/logs?stream=stderr")
    assert (answer.status, answer.json["code"]) == (409, "refused")
    os.kill(holder, signal.SIGKILL)
    log = attempt_folder(own_daemon, task) / "stderr.log"
    until(lambda: (log.stat().st_uid, log.stat().st_mode & 0o777) == (0, 0o400), "the output is sealed")
    assert ask_as(alice, own_daemon, "GET", f"/tasks/{task}/logs?stream=stderr").body == b"error\n"
