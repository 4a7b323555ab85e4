"""The least HTTP/1.1 that a command needs, on a Unix socket: `socket` and nothing else of the standard library.

Importing `http.client` takes some 40 ms, most of what a short command takes. This one sends a request whole, reads a
body with a length or in chunks, and keeps the connection for the next request. It must not know any route.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import NoReturn

from carma.errors import CarmaError, NotAllowed, Unreachable

_CHUNK = 64 * 1024
_HEAD_LIMIT = 64 * 1024
_CONNECT_S = 10.0
_LOST = (ConnectionError, BrokenPipeError, EOFError)


class Reply:
    """A status, and a body that is read once: whole, or piece by piece."""

    def __init__(self, link: Link, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._link = link

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives. Whoever stops early closes the connection with it."""
        whole = False
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                yield from self._link.chunks()
            else:
                yield from self._link.sized(int(self.headers.get("content-length", "0")))
            whole = True
        except (*_LOST, TimeoutError, ValueError) as error:
            raise self._link.lost("while it was answering", error) from error
        finally:
            if not whole or self.headers.get("connection", "").lower() == "close":
                self._link.close()


class Link:
    """One connection, opened when needed and kept between requests. For one thread at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._sent = 0  # bytes of the request under way

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._buffer.clear()

    def request(self, method: str, target: str, body: bytes | None, timeout_s: float | None) -> Reply:
        """Send and read the head of the answer; `timeout_s` bounds each wait for bytes (None: no bound)."""
        raw = _compose(method, target, body)
        reused = self._reusable()
        if not reused:
            self._connect()
        try:
            return self._exchange(raw, timeout_s)
        except (*_LOST, TimeoutError) as error:
            self.close()
            again = self._sent == 0 or method == "GET"
            if not reused or not again or isinstance(error, TimeoutError):
                raise self.lost("before it answered", error) from error
        self._connect()  # the daemon had closed the idle connection; asking again changes nothing
        try:
            return self._exchange(raw, timeout_s)
        except (*_LOST, TimeoutError) as error:
            self.close()
            raise self.lost("before it answered", error) from error

    def lost(self, when: str, error: Exception) -> CarmaError:
        why = "it took too long" if isinstance(error, TimeoutError) else "the connection was closed"
        return Unreachable(
            f"the daemon on {self._path} was lost {when}: {why}",
            "whether a change was made is not known: look with `carma queue`; `carma doctor` looks at the daemon",
        )

    def _exchange(self, raw: bytes, timeout_s: float | None) -> Reply:
        connection = self._open
        connection.settimeout(timeout_s)
        self._sent = 0
        # A daemon that refuses (too large, too busy) answers and closes before it has read all: the answer is there.
        with contextlib.suppress(ConnectionError), memoryview(raw) as left:
            while self._sent < len(raw):
                self._sent += connection.send(left[self._sent :])
        return self._read_head()

    def _reusable(self) -> bool:
        """An idle connection that has something to read has been closed by the daemon."""
        if self._socket is None:
            return False
        watch = select.poll()
        watch.register(self._socket, select.POLLIN)
        if self._buffer or watch.poll(0):
            self.close()
            return False
        return True

    @property
    def _open(self) -> socket.socket:
        if self._socket is None:
            raise EOFError
        return self._socket

    def _connect(self) -> None:
        self.close()
        until = time.monotonic() + _CONNECT_S
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(_CONNECT_S)
        while True:
            try:
                made.connect(self._path)
            except BlockingIOError as error:  # the daemon's queue of newcomers is full
                if time.monotonic() < until:
                    time.sleep(0.02)
                    continue
                made.close()
                self._no_daemon(error)
            except OSError as error:
                made.close()
                self._no_daemon(error)
            self._socket = made
            return

    def _no_daemon(self, error: OSError) -> NoReturn:
        if isinstance(error, PermissionError):
            raise NotAllowed(
                f"you may not use the daemon's socket {self._path}", "start a daemon of your own with `carma up`"
            ) from error
        if isinstance(error, BlockingIOError | TimeoutError):
            raise Unreachable(
                f"the daemon on {self._path} does not take connections", "`carma doctor` looks at it"
            ) from error
        if isinstance(error, FileNotFoundError):
            why = "there is no such socket"
        elif isinstance(error, ConnectionRefusedError):
            why = "nobody listens there"
        else:
            why = error.strerror or str(error)
        raise Unreachable(f"no daemon on {self._path}: {why}", "start one with `carma up`") from error

    def _read_head(self) -> Reply:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise EOFError("the head of the answer never ends")
            self._receive()
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        status = lines[0].split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1.") or not status[1].isdigit():
            raise EOFError("the answer is not HTTP")
        pairs = (line.partition(":") for line in lines[1:])
        return Reply(self, int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs})

    def _receive(self) -> None:
        data = self._open.recv(_CHUNK)
        if not data:
            raise EOFError
        self._buffer += data

    def sized(self, length: int) -> Iterator[bytes]:
        while length > 0:
            if not self._buffer:
                self._receive()
            piece = bytes(self._buffer[:length])
            del self._buffer[:length]
            length -= len(piece)
            yield piece

    def chunks(self) -> Iterator[bytes]:
        while (size := int(self._line().partition(b";")[0], 16)) > 0:
            yield from self.sized(size)
            self._line()
        while self._line():
            pass

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise EOFError("a line of the answer never ends")
            self._receive()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _compose(method: str, target: str, body: bytes | None) -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nhost: carma\r\naccept: */*\r\n"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    elif method != "GET":
        head += "content-length: 0\r\n"
    return head.encode("ascii") + b"\r\n" + (body or b"")
