"""One user cannot use up what all users share: places in the queue, connections, the daemon's memory."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import signal
import socket
from pathlib import Path

import pytest

from carma.errors import QuotaReached
from tests.harness import LIMIT_S, Daemon, until
from tests.multiuser.people import ROOT, Person
from tests.multiuser.serving import ask, ask_as, root_daemon, running, spec, submit, try_submit

MIB = 2**20


def test_there_is_a_limit_for_waiting_tasks_of_a_user_by_default(daemon: Daemon, alice: Person) -> None:
    (account,) = ask_as(alice, daemon, "GET", "/users").json
    assert account["waiting_limit"] is not None


def test_the_queue_of_one_user_does_not_fill_up_that_of_others(alice: Person, bob: Person) -> None:
    with root_daemon(quota__waiting=5) as daemon:
        statuses = [try_submit(alice, daemon, "true", held=True).status for _ in range(7)]
        assert statuses == [201] * 5 + [409, 409]
        body = {"spec": spec(alice, "true"), "array": {"indices": list(range(10))}, "held": True}
        assert ask_as(alice, daemon, "POST", "/tasks", body).json["code"] == QuotaReached.code
        assert try_submit(bob, daemon, "true", held=True).status == 201


@pytest.mark.parametrize("trick", ["release", "retry", "rename"])
def test_a_limit_cannot_be_avoided_by(alice: Person, trick: str) -> None:
    """Through another verb than submit."""
    with root_daemon(quota__waiting=2, quota__running=1) as daemon:
        first = submit(alice, daemon, "false")
        until(lambda: daemon.client.task(first).state == "finished", "the first task has ended")
        running(daemon, submit(alice, daemon, "sleep", "600"))
        held = [submit(alice, daemon, "true", held=True) for _ in range(2)]
        if trick == "release":
            assert ask_as(alice, daemon, "POST", f"/tasks/{held[0]}/release").status == 200
        elif trick == "retry":
            assert ask_as(alice, daemon, "POST", f"/tasks/{first}/retry", {}).status == 409
        else:
            assert ask_as(alice, daemon, "PATCH", f"/tasks/{held[0]}", {"name": "other"}).status == 200
        assert try_submit(alice, daemon, "true").status == 409
        states = [view.state for view in daemon.client.tasks(user="all")]
        assert (states.count("running"), len(states)) == (1, 3)


def test_an_array_of_one_user_cannot_make_the_daemon_store_gigabytes(alice: Person) -> None:
    """Three requests of 83 KB became 1.44 GB on the disk. What tasks have in common is to be stored once."""
    with root_daemon() as daemon:
        large = {"PATH": "/usr/bin:/bin", **{f"V{number}": "x" * 4_000 for number in range(20)}}
        body = {"spec": spec(alice, "true", environment=large), "array": {"indices": list(range(800))}, "held": True}
        answer = ask_as(alice, daemon, "POST", "/tasks", body)
        assert answer.status in (201, 409, 413), answer
        used = sum(file.stat().st_size for file in daemon.home.glob("carma.db*"))
        assert used < 16 * MIB


# Connections.


def hold_connections(path: Path, count: int, ready: Path, first_bytes: bytes = b"") -> None:
    """Holds connections until it is killed. Refused ones are not tried again."""
    held = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))  # waits while the daemon's queue of new connections is full
        connection.settimeout(LIMIT_S)
        with contextlib.suppress(OSError):
            connection.sendall(first_bytes)
        held.append(connection)
    ready.touch()
    signal.pause()


def test_connections_of_one_user_leave_room_for_others(alice: Person, bob: Person) -> None:
    ready = alice.home / f"ready-{secrets.token_hex(4)}"
    with root_daemon() as daemon, alice.background(lambda: hold_connections(daemon.paths.socket, 600, ready)):
        until(ready.exists, "Alice has as many connections as she gets")
        assert ask_as(bob, daemon, "GET", "/server").status == 200
        assert ask_as(bob, daemon, "POST", "/tasks", {"spec": spec(bob, "true")}).status == 201


def test_connections_of_all_users_together_leave_room_for_root(alice: Person, bob: Person) -> None:
    """The administrator must be able to look, and to end it."""
    ready = [person.home / f"ready-{secrets.token_hex(4)}" for person in (alice, bob)]
    with root_daemon() as daemon, contextlib.ExitStack() as stack:
        for person, file in zip((alice, bob), ready, strict=True):
            hold = functools.partial(hold_connections, daemon.paths.socket, 600, file)
            stack.enter_context(person.background(hold))
        until(lambda: all(file.exists() for file in ready), "both have as many connections as they get")
        assert ROOT.act(lambda: ask(daemon, "GET", "/tasks?user=all")).status == 200


def resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) // 1024


def test_bodies_that_never_end_do_not_fill_the_daemons_memory(alice: Person, bob: Person) -> None:
    """Each connection may announce a large body and keep back its last byte."""
    ready = alice.home / f"ready-{secrets.token_hex(4)}"
    body = json.dumps({"spec": spec(alice, "true", comment="x" * (7 * MIB))}).encode()
    head = f"POST /v1/tasks HTTP/1.1\r\nhost: c\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with root_daemon() as daemon:
        assert daemon.process is not None
        before = resident_mib(daemon.process.pid)
        with alice.background(lambda: hold_connections(daemon.paths.socket, 100, ready, head + body[:-1])):
            until(ready.exists, "Alice has sent all but the last bytes")
            assert resident_mib(daemon.process.pid) - before < 200
            assert ask_as(bob, daemon, "GET", "/server").status == 200
