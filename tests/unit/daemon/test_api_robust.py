"""Clients that are broken, slow, greedy or hostile: each costs the daemon an answer at most, and others nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carma import errors
from carma.config import Daemon, Settings
from carma.core.model.outcome import Succeeded
from carma.daemon.http.http_server import HttpLimits, fitting_limits
from carma.daemon.http.socket_address import Address
from tests.unit.daemon.api_server import ALICE, BOB, Served, serving, until


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One server for all that must not harm it; each test ends by seeing that it still answers."""
    with serving(settings=Settings(daemon=Daemon(max_request_mib=1)), limits=HttpLimits(head_bytes=16_384)) as made:
        yield made


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    assert shared.client().server().gpus == 2


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and Problem; the connection must then be closed by the daemon."""
    raw = b""
    with contextlib.suppress(ConnectionResetError):  # it closed with some of ours unread
        while piece := connection.recv(65_536):
            raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def ask(served: Served, head: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    with served.raw() as connection:
        connection.sendall(f"{head}\r\nhost: x\r\nconnection: close\r\n".encode())
        connection.sendall(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        return answer_of(connection)


@pytest.mark.parametrize(
    "garbage", [b"\0\xff\xfe" * 100, b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\0"]
)
def test_a_request_that_is_not_http_gets_a_usage_error(served: Served, garbage: bytes) -> None:
    with served.raw() as connection:
        connection.sendall(garbage)
        status, problem = answer_of(connection)
    assert (status, problem["code"]) == (400, "usage")


def test_an_unfinished_request_does_not_affect_others(served: Served) -> None:
    with served.raw() as silent, served.raw() as half, served.raw() as body:
        half.sendall(b"POST /v1/tasks HTT")
        body.sendall(b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert served.client().server().gpus == 2
        assert silent.fileno() > 0


def test_what_clients_do_wrong_does_not_fill_the_daemons_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        with served.raw() as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            answer_of(connection)
        with served.raw() as connection:
            connection.sendall(b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            until(lambda: served.open_requests == 1)
        until(lambda: served.open_requests == 0)
    assert [record.message for record in caplog.records if record.name.startswith(("uvicorn", "carma"))] == []


def test_a_head_without_end_is_refused(served: Served) -> None:
    with served.raw() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"GET /v1/server HTTP/1.1\r\n")
            for _ in range(1_000):
                connection.sendall(b"x-more: " + b"y" * 1_000 + b"\r\n")
        status, problem = answer_of(connection)
    assert (status, problem["code"]) == (413, "too_large")


def test_100_mb_are_refused_before_they_are_read(served: Served) -> None:
    with served.raw() as connection:
        connection.sendall(b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n")
        status, problem = answer_of(connection)
    assert (status, problem["code"]) == (413, "too_large")
    assert "max_request_mib" in problem["hint"]


def test_100_mb_that_were_not_announced_are_refused_while_they_arrive(served: Served) -> None:
    sent, piece = 0, b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with served.raw() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            while sent < 100 * 2**20:
                connection.sendall(piece)
                sent += 65_536
        status, problem = answer_of(connection)
    assert (status, problem["code"]) == (413, "too_large")
    assert sent < 20 * 2**20  # a limit of 1 MiB, and what the sockets hold


def test_the_client_learns_that_its_submission_is_too_large(served: Served) -> None:
    with pytest.raises(errors.TooLarge, match="1 MiB"):
        served.client().submit(served.request("true", "x" * (100 * 2**20)))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"spec": {"command": ["true"], "directory": "/\xff"}}', "not UTF-8"),
        (b"[]", "Expected `object`"),
        (b"{}", "`spec`"),
        (b'{"spec": {"command": ["true"], "directory": "/", "gpu": 1}}', "`gpu`"),
        (b'{"spec": {"command": ["true"], "directory": "/"}, "nonblok": true}', "`nonblok`"),
        (b'{"spec": {"command": "true", "directory": "/"}}', "$.spec.command"),
        (b'{"spec": {"command": ["true"], "directory": "/", "gpus": "two"}}', "$.spec.gpus"),
        (b'{"spec": ' * 100_000, "`spec`"),
        (b"[" * 100_000, "Expected `object`"),
    ],
)
def test_a_wrong_body_is_named(served: Served, body: bytes, named: str) -> None:
    status, problem = ask(served, "POST /v1/tasks HTTP/1.1", body)
    assert (status, problem["code"]) == (400, "usage")
    assert named in problem["message"]


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("GET /", 404, "not_found"),
        ("GET /v1/nothing", 404, "not_found"),
        ("GET /v1/tasks/", 404, "not_found"),
        ("DELETE /v1/tasks", 405, "usage"),
        ("GET /v1/tasks/99", 404, "not_found"),
        ("GET /v1/tasks/abc", 404, "not_found"),
        ("GET /v1/tasks/-1", 404, "not_found"),
        ("GET /v1/tasks/99999999999999999999999999", 404, "not_found"),
        ("GET /v1/tasks/9223372036854775807", 404, "not_found"),
        ("GET /v1/tasks/%00", 404, "not_found"),
        ("GET /v1/tasks/1%2F..%2F..%2Fetc", 404, "not_found"),
        ("GET /v1/tasks?limit=many", 400, "usage"),
        ("GET /v1/tasks?limt=3", 400, "usage"),
        ("GET /v1/tasks?limit=99999999999999999999", 400, "usage"),
        ("GET /v1/history?since=nan&limit=x", 400, "usage"),
        ("POST /v1/tasks/99/cancel", 404, "not_found"),
        ("GET /v1/tasks/99/logs", 404, "not_found"),
    ],
)
def test_a_wrong_address_is_answered_as_a_problem(served: Served, head: str, status: int, code: str) -> None:
    got, problem = ask(served, f"{head} HTTP/1.1")
    assert (got, problem["code"]) == (status, code)
    assert problem["message"]


def test_requests_in_one_packet_are_answered_in_order(served: Served) -> None:
    with served.raw() as connection:
        one = b"GET /v1/nothing%d HTTP/1.1\r\nhost: x\r\n"
        connection.sendall(one % 1 + b"\r\n" + one % 2 + b"\r\n" + one % 3 + b"connection: close\r\n\r\n")
        raw = b""
        while piece := connection.recv(65_536):
            raw += piece
    assert [raw.find(b"nothing%d" % number) > 0 for number in (1, 2, 3)] == [True] * 3
    assert raw.index(b"nothing1") < raw.index(b"nothing2") < raw.index(b"nothing3")


def test_200_idle_connections_delay_no_request(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(served.raw())
        until(lambda: served.open_connections >= 200)
        assert served.client().submit(served.request()).ids
    until(lambda: served.open_connections < 100)


def test_too_many_connections_are_refused_politely_and_only_for_a_while() -> None:
    with serving(limits=HttpLimits(connections=4, connections_per_user=4)) as served:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(served.raw())
            until(lambda: served.open_connections == 4)
            for _ in range(3):
                with pytest.raises(errors.Busy, match="4 connections open"):
                    served.client()
        until(lambda: served.open_connections == 0)
        assert served.client().server().gpus == 2


def test_one_user_cannot_take_all_connections() -> None:
    with serving(own_uid=0, limits=HttpLimits(connections=10, connections_per_user=2)) as served:
        with contextlib.ExitStack() as stack:
            served.uid = ALICE
            for _ in range(2):
                stack.enter_context(served.raw())
            until(lambda: served.open_connections == 2)
            with pytest.raises(errors.Busy, match="2 connections"):
                served.client(ALICE)
            assert served.client(BOB).server().gpus == 2
        until(lambda: served.open_connections <= 1)
        assert served.client(ALICE).server().gpus == 2


def test_a_connection_that_asks_nothing_is_closed() -> None:
    with serving(limits=HttpLimits(idle_s=0.05, request_s=0.05)) as served:
        with served.raw() as idle, served.raw() as half:
            half.sendall(b"GET /v1/ser")
            assert idle.recv(10) == b""
            assert half.recv(10) == b""
        until(lambda: served.open_connections == 0)


def test_a_connection_that_has_asked_all_is_closed_and_asked_again_without_the_user_noticing() -> None:
    with serving(limits=HttpLimits(idle_s=1.0)) as served:
        client = served.client()
        assert client.server().gpus == 2
        until(lambda: served.open_connections == 0)
        assert client.submit(served.request()).ids == (1,)


def test_a_reader_that_stands_still_is_dropped() -> None:
    with serving(limits=HttpLimits(stalled_s=0.05)) as served:
        task = served.client().submit(served.request()).ids[0]
        served.estimated(task)
        key = served.place(task)
        stdout, _ = served.log_paths(key)
        stdout.parent.mkdir()
        stdout.write_bytes(b"x" * 10_000_000)
        served.end(key, Succeeded())
        before = served.open_connections
        with served.raw() as connection:
            connection.sendall(f"GET /v1/tasks/{task}/logs HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
            until(lambda: served.open_connections == before)


def test_a_defect_in_a_handler_is_an_answer_and_not_an_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_state: object, _now: float) -> None:
        raise ZeroDivisionError("secret")

    client = served.client()
    with monkeypatch.context() as patched:
        patched.setattr("carma.daemon.api.application.gpu_views", broken)
        with pytest.raises(errors.CarmaError, match="gpus: ZeroDivisionError") as caught:
            client.gpus()
    assert "secret" not in str(caught.value)
    assert len(client.gpus()) == 2


def test_the_socket_has_its_mode_from_the_first_moment_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    made = Address(path, 0o600).bind()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(errors.AlreadyRunning, match="another daemon"):
        Address(path, 0o600).bind()
    made.close()
    Address(path, 0o666).bind().close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
    assert os.listdir(tmp_path) == ["s"]


def test_a_socket_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("precious")
    with pytest.raises(errors.BadSettings, match="not a socket"):
        Address(plain, 0o600).bind()
    assert plain.read_text() == "precious"
    with pytest.raises(errors.BadSettings, match="too long"):
        Address(tmp_path / ("x" * 120), 0o600).bind()
    with pytest.raises(errors.BadSettings, match="missing/s"):
        Address(tmp_path / "missing" / "s", 0o600).bind()


def test_limits_leave_room_for_the_daemons_own_files() -> None:
    own, root = fitting_limits(1000), fitting_limits(0)
    assert own.connections == own.connections_per_user
    assert root.connections_per_user < root.connections
