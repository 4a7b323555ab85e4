"""The client against a scripted peer: bodies of both kinds, connections that are kept or lost, errors as they were."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from carma import errors
from carma.client import Client
from carma.core.model.values import TaskSpec
from carma.wire.api_types import Done, Problem, SubmitRequest
from tests.unit.daemon.api_server import LIMIT_S, until

DONE = msgspec.json.encode(Done(note="done"))
Turn = Callable[[socket.socket], list[bytes]]


def answer(body: bytes = DONE, *, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def read_request(connection: socket.socket) -> bytes:
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = connection.recv(65_536)
        if not piece:
            return raw
        raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    wanted = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0)
    while len(body) < wanted:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


class Peer:
    """Plays one script for each connection in turn, then stops listening."""

    def __init__(self, path: Path, *scripts: Turn) -> None:
        self.requests: list[bytes] = []
        self.closed = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(LIMIT_S)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._play, args=(scripts,), daemon=True)
        self._thread.start()

    def _play(self, scripts: tuple[Turn, ...]) -> None:
        with self._listener:
            for script in scripts:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(LIMIT_S)
                    self.requests.extend(script(connection))
                self.closed += 1

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def replies(*raw: bytes) -> Turn:
    """Answers each request with one of these."""

    def turn(connection: socket.socket) -> list[bytes]:
        requests = []
        for one in raw:
            requests.append(read_request(connection))
            connection.sendall(one)
        return requests

    return turn


def takes_and_leaves(first: bytes) -> Turn:
    """Answers once; takes a second request and goes away without an answer."""

    def turn(connection: socket.socket) -> list[bytes]:
        one = read_request(connection)
        connection.sendall(first)
        return [one, read_request(connection)]

    return turn


@pytest.fixture
def path() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="carma-cl-"))
    yield home / "s"
    shutil.rmtree(home)


@contextlib.contextmanager
def talking(path: Path, *scripts: Turn, timeout_s: float = LIMIT_S) -> Iterator[tuple[Client, Peer]]:
    """A client, and a peer that plays these scripts, one for each connection."""
    peer = Peer(path, *scripts)
    with Client(path, timeout_s=timeout_s) as client:
        yield client, peer
    peer.join()


def test_requests_share_a_connection(path: Path) -> None:
    with talking(path, replies(answer(), answer(), answer())) as (client, peer):
        client.hold(1)
        client.release(2)
        assert client.cancel(3, reason="ü").note == "done"
    assert [request.split(b" HTTP")[0] for request in peer.requests] == [
        b"POST /v1/tasks/1/hold",
        b"POST /v1/tasks/2/release",
        b"POST /v1/tasks/3/cancel",
    ]
    assert '"reason":"ü"'.encode() in peer.requests[2]


def test_a_body_in_chunks_is_put_together(path: Path) -> None:
    body = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in (DONE[:3], DONE[3:]))
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\nx-trailer: 1\r\n\r\n"
    with talking(path, replies(raw, answer())) as (client, _):
        assert client.hold(1).note == "done"
        assert client.hold(1).note == "done"  # on the same connection


def test_an_answer_byte_by_byte_is_understood(path: Path) -> None:
    def drip(connection: socket.socket) -> list[bytes]:
        request = read_request(connection)
        for byte in answer():
            connection.sendall(bytes([byte]))
        return [request]

    with talking(path, drip) as (client, _):
        assert client.hold(1).note == "done"


def test_query_values_are_quoted(path: Path) -> None:
    with talking(path, replies(answer(b"[]"))) as (client, peer):
        client.tasks(user="a b&c=ü", limit=5)
    assert peer.requests[0].startswith(b"GET /v1/tasks?user=a%20b%26c%3D%C3%BC&limit=5 HTTP/1.1\r\n")


def test_a_connection_that_the_daemon_has_closed_is_opened_again(path: Path) -> None:
    with talking(path, replies(answer()), replies(answer())) as (client, peer):
        client.hold(1)
        until(lambda: peer.closed == 1)
        client.hold(2)
    assert len(peer.requests) == 2


def test_a_question_is_asked_again_when_the_connection_is_lost_before_the_answer(path: Path) -> None:
    with talking(path, takes_and_leaves(answer(b"[]")), replies(answer(b"[]"))) as (client, peer):
        assert client.tasks() == []
        assert client.tasks() == []
    assert len(peer.requests) == 3


def test_a_change_is_never_asked_for_twice(path: Path) -> None:
    with talking(path, takes_and_leaves(answer())) as (client, peer):
        client.hold(1)
        with pytest.raises(errors.Unreachable, match="closed") as caught:
            client.submit(SubmitRequest(spec=TaskSpec(command=("true",), directory="/")))
        assert "may or may not" in caught.value.hint
    assert len(peer.requests) == 2


def test_a_question_that_is_lost_leaves_no_doubt_about_a_change(path: Path) -> None:
    with talking(path, replies(b"")) as (client, _), pytest.raises(errors.Unreachable, match="closed") as caught:
        client.tasks()
    assert "may or may not" not in caught.value.hint


@pytest.mark.parametrize(
    "kind", [kind for kind in errors.every() if kind is not errors.CarmaError], ids=lambda kind: kind.code
)
def test_an_error_comes_back_as_it_was_raised(path: Path, kind: type[errors.CarmaError]) -> None:
    body = msgspec.json.encode(Problem(code=kind.code, message="no", hint="do this"))
    with talking(path, replies(answer(body, status=f"{kind.http_status} X"))) as (client, _):
        with pytest.raises(kind, match="no") as caught:
            client.hold(1)
        assert caught.value.hint == "do this"
        assert type(caught.value) is kind


def test_an_error_of_a_newer_daemon_is_still_an_error(path: Path) -> None:
    body = b'{"code": "brand_new", "message": "something new", "more": 1}'
    with (
        talking(path, replies(answer(body, status="418 X"))) as (client, _),
        pytest.raises(errors.CarmaError, match="new"),
    ):
        client.hold(1)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n",
        b"",
        b"x" * 100_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_a_broken_answer_is_an_error_and_not_a_surprise(path: Path, raw: bytes) -> None:
    with talking(path, replies(raw)) as (client, _), pytest.raises(errors.Unreachable, match="closed"):
        client.hold(1)


def test_an_answer_that_is_not_what_was_asked_for_is_an_error(path: Path) -> None:
    with (
        talking(path, replies(answer(b"<html>"))) as (client, _),
        pytest.raises(errors.CarmaError, match="cannot be read"),
    ):
        client.hold(1)


def test_an_answer_that_never_comes_ends_with_the_time_limit(path: Path) -> None:
    enough = threading.Event()

    def says_nothing(connection: socket.socket) -> list[bytes]:
        request = read_request(connection)
        enough.wait(LIMIT_S)
        return [request]

    with talking(path, says_nothing, timeout_s=0.05) as (client, _):
        with pytest.raises(errors.Unreachable, match="in time"):
            client.hold(1)
        enough.set()


def test_a_refusal_before_all_was_sent_is_read(path: Path) -> None:
    body = msgspec.json.encode(Problem(code="too_large", message="too large"))

    def refuses(connection: socket.socket) -> list[bytes]:
        connection.recv(10)
        connection.sendall(answer(body, status="413 X", extra="connection: close\r\n"))
        return []

    spec = TaskSpec(command=("true", "x" * 5_000_000), directory="/")
    with talking(path, refuses) as (client, _), pytest.raises(errors.TooLarge):
        client.submit(SubmitRequest(spec=spec))


def test_without_a_daemon_the_next_step_is_named(path: Path) -> None:
    with Client(path) as client:
        with pytest.raises(errors.Unreachable, match="no such socket") as caught:
            client.server()
        assert (caught.value.exit_code, "carma up" in caught.value.hint) == (3, True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
            stale.bind(str(path))
        with pytest.raises(errors.Unreachable, match="no process listens"):
            client.server()
    with Client("/" + "x" * 200) as client, pytest.raises(errors.Unreachable):
        client.server()


def test_a_socket_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, _path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with Client(path) as client, pytest.raises(errors.NotAllowed, match="may not use"):
        client.server()


def test_bytes_that_are_not_text_are_named(path: Path) -> None:
    spec = TaskSpec(command=("true", "\udcff"), directory="/")
    with Client(path) as client, pytest.raises(errors.Usage, match="not UTF-8"):
        client.submit(SubmitRequest(spec=spec))


def test_events_are_read_across_pieces_and_heartbeats_passed_over(path: Path) -> None:
    event = b'id: 4\nevent: task_held\ndata: {"sequence":4,"at":1.5,"event":"task_held","task":7,"text":"t"}\n\n'
    stream = b": subscribed\n\n" + event + b": still here\n\n" + event
    pieces = [stream[start : start + 11] for start in range(0, len(stream), 11)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
    with talking(path, replies(raw)) as (client, _):
        assert [(found.sequence, found.task) for found in client.events()] == [(4, 7), (4, 7)]


def test_importing_it_does_not_import_the_heavy_parts_of_the_standard_library() -> None:
    code = "import sys, carma.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"http.client", "urllib.request", "ssl", "email", "asyncio", "starlette", "uvicorn"} & set(loaded)
