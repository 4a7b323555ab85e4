"""HTTP on a Unix socket that we bind ourselves: who connects is known from the kernel, and nobody can wear it out.

Every limit is here: open connections and bytes of unfinished requests (in all and for each user), time for a request to
arrive, size of its head, time that a reader may stand still. The size of one body is checked where it is read
(daemon/request.py). No TCP, ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import socket
import stat
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carma.core.model.values import Record
from carma.daemon.auth import ROOT_UID, Peer, PeerReader, read_peer
from carma.errors import AlreadyRunning, BadSettings, Busy, CarmaError, TooLarge, Usage
from carma.store.store_errors import hint_of, reason_of
from carma.transport import somebody_listens
from carma.wire.api_types import Problem

_PATH_LIMIT = 107  # sockaddr_un.sun_path, less its NUL
_REASONS = {400: "Bad Request", 403: "Forbidden", 413: "Content Too Large", 503: "Service Unavailable"}


class Limits(Record, frozen=True, kw_only=True):
    connections: int = 512
    connections_per_user: int = 512  # of one user; root is exempt from both
    unfinished_bytes: int = 64 * 1024 * 1024  # of the bodies that one user is sending at the same time; root is exempt
    head_bytes: int = 64 * 1024
    request_s: float = 30.0  # for a whole request to arrive
    idle_s: float = 75.0  # between requests
    stalled_s: float = 30.0  # a reader that takes nothing for so long is dropped
    closing_s: int = 3  # for open answers, when the daemon ends


def fitting_limits(own_uid: int) -> Limits:
    """As many connections as the process may hold open, with room for the daemon's own files.

    With several users (the daemon is root) one of them cannot take all.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 512
    if soft != resource.RLIM_INFINITY:
        most = max(16, min(most, soft // 2))
    return Limits(connections=most, connections_per_user=most // 2 if own_uid == ROOT_UID else most)


def bind(path: Path, mode: int) -> socket.socket:
    """A listening socket at `path`. A stale one is replaced; a living one is another daemon.

    It is made under another name, gets its mode, and is then renamed: at no moment can it be reached with other rights.
    """
    fresh = path.with_name(f".{os.getpid()}")
    if max(len(os.fsencode(name)) for name in (path, fresh)) > _PATH_LIMIT:
        raise BadSettings(
            f"the socket's path is too long: {path}",
            f"a Unix socket takes {_PATH_LIMIT} bytes; choose a shorter CARMA_HOME",
        )
    _refuse_if_alive(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        made.bind(str(fresh))
        os.chmod(fresh, mode)
        made.listen(1024)
        os.rename(fresh, path)
    except OSError as error:
        made.close()
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise BadSettings(f"cannot make the socket {path}: {reason_of(error)}", hint_of(error)) from error
    made.setblocking(False)
    return made


def _refuse_if_alive(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadSettings(f"cannot look at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise BadSettings(f"{path} exists and is not a socket", "move it away, or choose another CARMA_HOME")
    if somebody_listens(path):
        raise AlreadyRunning(f"another daemon answers on {path}", "`carma down` ends it")


class Connection(HttpToolsProtocol):
    """One client. Adds the peer to each request, and the limits that uvicorn leaves to a proxy in front of it."""

    def __init__(
        self,
        *args: Any,
        limits: Limits,
        peer_of: PeerReader,
        held: Counter[int],
        unfinished: Counter[int],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._peer_of = peer_of
        self._held = held  # connections by uid, without those that are refused
        self._unfinished = unfinished  # bytes by uid
        self._body_bytes = 0  # of those, this connection's
        self._peer: Peer | None = None
        self._counted = False
        self._head_bytes = 0
        self._in_head = True
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that a reader that stands still is noticed at the first byte
        try:
            self._peer = self._peer_of(transport.get_extra_info("socket"))
        except OSError:
            transport.abort()
            return
        if refusal := self._too_many(self._peer.uid):
            self._refuse(refusal)
            return
        self._held[self._peer.uid] += 1
        self._counted = True
        self._arm(self._limits.idle_s)

    def _too_many(self, uid: int) -> CarmaError | None:
        """Root always gets in, to look and to end it: there are descriptors left (`fitting_limits`)."""
        if uid == ROOT_UID:
            return None
        hint = "try again in a moment; `carma queue` in a tight loop is better written as `carma wait`"
        if self._held.total() >= self._limits.connections:
            return Busy(f"the daemon has {self._limits.connections} connections open, which is its limit", hint)
        if self._held[uid] >= self._limits.connections_per_user:
            return Busy(f"you have {self._held[uid]} connections open to the daemon, which is the limit", hint)
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._stall):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self._forget_body()
        if self._counted and self._peer is not None:
            self._counted = False
            self._held[self._peer.uid] -= 1
            if self._held[self._peer.uid] <= 0:
                del self._held[self._peer.uid]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self._refuse(TooLarge(f"the request's head is larger than {self._limits.head_bytes} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        cast(dict[str, Any], self.scope)["state"]["peer"] = self._peer
        self._arm(self._limits.request_s)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """One request is limited by its own size. Many that never end must not add up."""
        if self._peer is not None and self._peer.uid != ROOT_UID and not self.transport.is_closing():
            uid = self._peer.uid
            self._body_bytes += len(body)
            self._unfinished[uid] += len(body)
            if self._unfinished[uid] > max(self._limits.unfinished_bytes, self._body_bytes):
                self._refuse(Busy("you are sending too many large requests at the same time", "send them one by one"))
                return
        super().on_body(body)

    def _forget_body(self) -> None:
        if self._body_bytes and self._peer is not None:
            self._unfinished[self._peer.uid] -= self._body_bytes
            if self._unfinished[self._peer.uid] <= 0:
                del self._unfinished[self._peer.uid]
        self._body_bytes = 0

    def on_message_complete(self) -> None:
        self._forget_body()
        self._in_head = True  # the next byte begins another head
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        super().on_message_complete()

    def _arm(self, seconds: float) -> None:
        """From now a (further) request has so long to arrive; a body may take another `request_s` after its head."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._arrival = None
        if not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(Usage(msg, "this is an HTTP/1.1 socket; see `carma --help` and the API reference"))

    def _refuse(self, error: CarmaError) -> None:
        """Answer without an application, and close."""
        body = msgspec.json.encode(Problem(code=error.code, message=str(error), hint=error.hint))
        status = error.http_status
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """Without signal handlers (the daemon has its own) and without waking ten times a second to look at a flag."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()


class HttpServer:
    """Serves `app` on `listener` until `stop()`, which sets `app.state.closing` first: streams end by themselves."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        limits: Limits = Limits(),
        *,
        peer_of: PeerReader = read_peer,
        closing: asyncio.Event | None = None,
    ) -> None:
        self._listener = listener
        self._closing = [event for event in (closing, getattr(app.state, "closing", None)) if event is not None]
        self._held: Counter[int] = Counter()
        unfinished: Counter[int] = Counter()
        protocol = functools.partial(Connection, limits=limits, peer_of=peer_of, held=self._held, unfinished=unfinished)
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what a client does wrong is the client's to know; a log that it can fill is not
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=limits.closing_s,
        )
        self._uvicorn = _Uvicorn(config)

    async def run(self) -> None:
        await self._uvicorn.serve(sockets=[self._listener])

    async def move_to(self, listener: socket.socket) -> None:
        """Serve on another socket from now on. Must be running; connections that are open stay open."""
        before = self._uvicorn.servers
        await self._uvicorn.startup(sockets=[listener])
        for server in before:
            server.close()

    def stop(self) -> None:
        for event in self._closing:
            event.set()
        self._uvicorn.should_exit = True
        self._uvicorn.stopping.set()

    @property
    def open_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    @property
    def open_requests(self) -> int:
        return len(self._uvicorn.server_state.tasks)
