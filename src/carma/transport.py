"""A minimal HTTP/1.1 client on a Unix socket. It uses only `socket`: importing `http.client` takes about 40 ms, most of
the time of a short command.

It sends a request at once, reads a body with a length or in chunks, and keeps the connection for the next request. It
must not know any route.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Iterator
from os import PathLike, environ, fspath, geteuid
from typing import NoReturn

from carma import paths
from carma.errors import CarmaError, NotAllowed, Unreachable
from carma.procfs import process

_CHUNK = 64 * 1024
_HEAD_LIMIT = 64 * 1024
_CONNECT_S = 10.0
_CHECK_S = 10.0  # without an answer for this long, check whether the daemon's process is stopped
_LOST = (ConnectionError, BrokenPipeError, EOFError)
_NOT_MAPPED = 65534  # a user namespace shows unknown users of the machine as this uid


class Reply:
    """A status, and a body that can be read once: at once, or piece by piece."""

    def __init__(self, link: Link, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._link = link

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives. A caller that stops early closes the connection."""
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


class _Stopped(TimeoutError):
    """The daemon's process exists but is stopped: it will not answer."""


class Link:
    """One connection, opened when needed and kept between requests. For one thread at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._sent = 0  # bytes of the current request
        self._pid, self._uid = 0, 0  # of the listening process; 0: unknown
        self._changes = False  # whether the current request may change something

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._buffer.clear()

    def interrupt(self) -> None:
        """The other end seems to be closed, also to a thread that waits for it now."""
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def request(self, method: str, target: str, body: bytes | None, timeout_s: float | None) -> Reply:
        """Send the request and read the head of the answer. `timeout_s` limits each wait for bytes (None: no limit)."""
        raw = _compose(method, target, body)
        self._changes = method != "GET"
        reused = self._reusable()
        while True:
            if not reused:
                self._connect()
            try:
                return self._exchange(raw, timeout_s)
            except (*_LOST, TimeoutError) as error:
                self.close()
                again = self._sent == 0 or method == "GET"
                if not reused or not again or isinstance(error, TimeoutError):
                    raise self.lost("before it answered", error) from error
            reused = False  # the daemon had closed the idle connection: the request had no effect

    def lost(self, when: str, error: Exception) -> CarmaError:
        """`error` as an error for the user. Only after a request that changes something, the result is in doubt."""
        doubt = "the change may or may not have been made: check with `carma queue`; " if self._changes else ""
        who = f"the daemon (pid {self._pid})" if self._pid else "the daemon"
        what, hint = (
            f"the connection to the daemon on {self._path} was closed {when}",
            "`carma doctor` checks the daemon",
        )
        if isinstance(error, TimeoutError):
            what = f"{who} on {self._path} did not answer in time"
        if isinstance(error, _Stopped):
            what = f"{who} on {self._path} does not answer: its process is stopped"
            hint = f"`kill -CONT {self._pid}` resumes it"
        return Unreachable(what, doubt + hint)

    def _exchange(self, raw: bytes, timeout_s: float | None) -> Reply:
        connection = self._open
        connection.settimeout(timeout_s)
        self._sent = 0
        # A daemon that refuses (too large, too busy) answers and closes before it has read the whole request.
        with contextlib.suppress(ConnectionError), memoryview(raw) as left:
            while self._sent < len(raw):
                self._sent += connection.send(left[self._sent :])
        self._await(timeout_s)
        connection.settimeout(timeout_s)
        return self._read_head()

    def _await(self, timeout_s: float | None) -> None:
        """Waits until the answer begins. A busy daemon gets the whole time limit, a stopped one does not."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _CHECK_S if until is None else min(_CHECK_S, max(0.0, until - time.monotonic()))
            if self._readable(left_s):
                return
            if _is_stopped(self._pid):
                raise _Stopped
            if until is not None and time.monotonic() >= until:
                raise TimeoutError

    def _reusable(self) -> bool:
        """An idle connection with something to read was closed by the daemon."""
        if self._socket is None:
            return False
        if self._readable(0.0):
            self.close()
            return False
        return True

    def _readable(self, wait_s: float) -> bool:
        watch = select.poll()
        watch.register(self._open, select.POLLIN)
        return bool(self._buffer or watch.poll(wait_s * 1000))

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
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                    made.close()
                    self._no_daemon(error)
                time.sleep(0.02)  # the daemon's queue of new connections is full
        self._socket = made
        self._pid, self._uid = _peer(made)
        if geteuid() != 0:  # root may use the daemon of any user
            self._refuse_impostor()

    def require_trusted(self) -> None:
        """Raise NotAllowed unless the daemon runs as root or as this user. Call it before sending private data."""
        if not self._reusable():
            self._connect()
        self._refuse_impostor()

    def _refuse_impostor(self) -> None:
        """Any user can listen in a directory of their own. A daemon of another user would not serve this user."""
        if self._uid in (0, geteuid()) or (self._uid == _NOT_MAPPED and _in_user_namespace()):
            return
        self.close()
        raise NotAllowed(
            f"the process that listens on {self._path} belongs to user {self._uid}, neither to root nor to you",
            "nothing was sent; check CARMA_HOME",
        )

    def _no_daemon(self, error: OSError) -> NoReturn:
        if isinstance(error, PermissionError):
            raise NotAllowed(
                f"you may not use the daemon's socket {self._path}", "start a daemon of your own with `carma up`"
            ) from error
        if isinstance(error, BlockingIOError | TimeoutError):
            raise Unreachable(
                f"the daemon on {self._path} accepts no connections", "`carma doctor` checks it"
            ) from error
        if isinstance(error, FileNotFoundError):
            why = "there is no such socket"
        elif isinstance(error, ConnectionRefusedError):
            why = "no process listens on it"
        else:
            why = error.strerror or str(error)
        raise Unreachable(f"no daemon on {self._path}: {why}", _start_hint(self._path)) from error

    def _read_head(self) -> Reply:
        lines = self._take_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
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
        while (size := int(self._take_until(b"\r\n").partition(b";")[0], 16)) > 0:
            yield from self.sized(size)
            self._take_until(b"\r\n")
        while self._take_until(b"\r\n"):
            pass

    def _take_until(self, end: bytes) -> bytes:
        """What precedes the first `end`, which is dropped: the head of an answer, or a line."""
        while (size := self._buffer.find(end)) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise EOFError("a line or the head of the answer is too long")
            self._receive()
        taken = bytes(self._buffer[:size])
        del self._buffer[: size + len(end)]
        return taken


def has_listener(path: str | PathLike[str]) -> bool:
    """Whether a process listens on this socket, even if it does not answer (full queue, missing permission)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _start_hint(path: str) -> str:
    """What to do without a daemon on this socket. A dead daemon of the user's own may hide the server's daemon."""
    system = fspath(paths.SYSTEM_SOCKET)
    if path == system and geteuid() == 0:
        return "start it with `systemctl start carma` if it is a service, otherwise with `carma up`"
    if path == system:
        return "ask an administrator to start it (`systemctl start carma`), or start your own with `carma up`"
    if geteuid() != 0 and not environ.get("CARMA_HOME") and has_listener(system):
        return f"a daemon for all users listens on {system}: remove {path} to use it, or start yours with `carma up`"
    return "start one with `carma up`"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the listening process; 0 if the kernel does not report them."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except (AttributeError, OSError):
        return 0, 0
    return int.from_bytes(raw[:4], sys.byteorder), int.from_bytes(raw[4:8], sys.byteorder)


def _in_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", "rb") as file:
            return file.read().split() != [b"0", b"0", b"4294967295"]
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    found = process(pid)
    return found is not None and found.state in "Tt"


def _compose(method: str, target: str, body: bytes | None) -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nhost: carma\r\naccept: */*\r\n"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    elif method != "GET":
        head += "content-length: 0\r\n"
    return head.encode("ascii") + b"\r\n" + (body or b"")
