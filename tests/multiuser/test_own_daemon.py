"""A daemon that a user starts for herself serves her and root only.

Its process has one right more than she has: to read files, because the interpreter may lie where only root can read. It
is the one that is attacked here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Daemon
from tests.multiuser.people import ROOT, Person
from tests.multiuser.serving import SETTINGS, ask, ask_as, ended, shell, spec

_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522


def become_a_reader(uid: int, gid: int) -> None:
    """Give up root but for the right to read files, also in programs that are executed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)
    bit = 1 << _CAP_DAC_READ_SEARCH
    sets = struct.pack("6I", bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)


@pytest.fixture(scope="module")
def daemon_of_alice(alice: Person) -> Iterator[Daemon]:
    home = alice.folder(f"c{os.urandom(3).hex()}")
    daemon = Daemon(home, **SETTINGS)
    daemon.log_file = alice.home / f"{home.name}.log"
    daemon.environ["HOME"] = str(alice.home)
    daemon.prelude = (
        f"from tests.multiuser.test_own_daemon import become_a_reader; become_a_reader({alice.uid}, {alice.gid})"
    )
    try:
        yield daemon.start()
    finally:
        daemon.clean()


def test_a_users_daemon_runs_the_users_tasks_as_the_user(daemon_of_alice: Daemon, alice: Person) -> None:
    task = shell(alice, daemon_of_alice, f"id -u > {alice.home}/who")
    assert ended(daemon_of_alice, task).exit_code == 0
    assert (alice.home / "who").read_text().split() == [str(alice.uid)]
    assert ROOT.act(lambda: ask(daemon_of_alice, "GET", "/server")).json["you_are_admin"] is True


def test_the_directory_of_a_users_daemon_is_closed_to_others(daemon_of_alice: Daemon, bob: Person) -> None:
    with pytest.raises(PermissionError):
        bob.act(lambda: os.listdir(daemon_of_alice.home))
    with pytest.raises(PermissionError):
        ask_as(bob, daemon_of_alice, "GET", "/server")


def test_a_users_daemon_serves_no_other_user_even_when_its_socket_is_open(
    daemon_of_alice: Daemon, alice: Person, bob: Person
) -> None:
    """She opens it by mistake: Bob's tasks would run as hers."""
    marker = alice.home / "marker"
    requests: tuple[tuple[str, str, object], ...] = (
        ("GET", "/server", None),
        ("GET", "/tasks?user=all", None),
        ("POST", "/tasks", {"spec": spec(bob, "touch", str(marker), directory="/")}),
        ("POST", "/shutdown", {}),
    )
    alice.act(lambda: set_modes(daemon_of_alice.home, 0o755, 0o666))
    try:
        for method, target, body in requests:
            with contextlib.suppress(ConnectionError):
                assert ask_as(bob, daemon_of_alice, method, target, body).status == 403
    finally:
        alice.act(lambda: set_modes(daemon_of_alice.home, 0o700, 0o600))
    assert not marker.exists()
    assert daemon_of_alice.answers()


def set_modes(home: Path, directory: int, sock: int) -> None:
    home.chmod(directory)
    (home / "carma.sock").chmod(sock)


def test_root_gets_no_task_run_by_a_users_daemon(daemon_of_alice: Daemon, alice: Person) -> None:
    """It would run as Alice, in root's name. Alice cannot make root's programs run as root either."""
    body = {"spec": spec(alice, "id", "-u", directory="/")}
    answer = ROOT.act(lambda: ask(daemon_of_alice, "POST", "/tasks", body))
    if answer.status == 201:
        assert ended(daemon_of_alice, answer.json["ids"][0]).exit_code == 126
