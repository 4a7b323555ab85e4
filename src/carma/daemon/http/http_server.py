"""HTTP on a given socket. The kernel identifies each client of a Unix socket; no client can exhaust the daemon.

All limits are here: open connections and bytes of unfinished requests (in total and per user), the time for a request
to arrive, the size of its head, the time that a reader may take nothing. The size of one body is checked where it is
read (request.py). The API must never be served on TCP, which does
not say which user connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
from collections import Counter
from collections.abc import Generator
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carma.core.model.values import Record
from carma.daemon.auth import ROOT_UID, Peer, PeerReader, read_peer
from carma.errors import Busy, CarmaError, TooLarge, Usage
from carma.wire.api_types import Problem

_REASONS = {400: "Bad Request", 403: "Forbidden", 413: "Content Too Large", 503: "Service Unavailable"}


class HttpLimits(Record, frozen=True, kw_only=True):
    connections: int = 512
    connections_per_user: int = 512  # root is exempt from both
    unfinished_bytes: int = 64 * 1024 * 1024  # of the bodies that one user is sending at the same time; root is exempt
    head_bytes: int = 64 * 1024
    request_s: float = 30.0  # for a whole request to arrive
    idle_s: float = 75.0  # between requests
    stalled_s: float = 30.0  # a connection whose reader takes nothing for this long is closed
    closing_s: int = 3  # for open answers, when the daemon ends


def fitting_limits(own_uid: int) -> HttpLimits:
    """Limits that allow as many connections as the process may hold open, with room for the daemon's own files. If the
    daemon serves several users (it is root), one of them cannot take all connections."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 512
    if soft != resource.RLIM_INFINITY:
        most = max(16, min(most, soft // 2))
    return HttpLimits(connections=most, connections_per_user=most // 2 if own_uid == ROOT_UID else most)


class Connection(HttpToolsProtocol):
    """One client. Adds the peer to each request, and the limits that uvicorn leaves to a proxy in front of it."""

    def __init__(self, *args: Any, host: HttpServer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host = host
        self._limits = host.limits
        self._body_bytes = 0  # this connection's part of the user's unfinished bytes
        self._peer: Peer | None = None
        self._counted = False
        self._head_bytes = 0
        self._in_head = True
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that a stalled reader is noticed at the first byte
        try:
            self._peer = self._host.peer_of(transport.get_extra_info("socket"))
        except OSError:
            transport.abort()
            return
        if refusal := self._too_many(self._peer.uid):
            self._refuse(refusal)
            return
        self._host.connections[self._peer.uid] += 1
        self._counted = True
        self._expect_request(self._limits.idle_s)

    def _too_many(self, uid: int) -> CarmaError | None:
        """Root can always connect, to inspect or end the daemon: `fitting_limits` leaves descriptors for that."""
        if uid == ROOT_UID:
            return None
        hint = "try again in a moment; to wait for a task, use `carma wait` instead of `carma queue` in a loop"
        if self._host.connections.total() >= self._limits.connections:
            return Busy(f"the daemon has {self._limits.connections} connections open, which is its limit", hint)
        if self._host.connections[uid] >= self._limits.connections_per_user:
            return Busy(
                f"you have {self._host.connections[uid]} connections open to the daemon, which is the limit", hint
            )
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._arrival)
        _cancel(self._stall)
        self._unset_keepalive_if_required()
        self._forget_body()
        if self._counted and self._peer is not None:
            self._counted = False
            _subtract(self._host.connections, self._peer.uid, 1)
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
        self._expect_request(self._limits.request_s)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """One request is limited by its own size. Many that never end must not add up."""
        if self._peer is not None and self._peer.uid != ROOT_UID and not self.transport.is_closing():
            uid = self._peer.uid
            self._body_bytes += len(body)
            self._host.unfinished[uid] += len(body)
            if self._host.unfinished[uid] > max(self._limits.unfinished_bytes, self._body_bytes):
                self._refuse(Busy("you are sending too many large requests at the same time", "send them one by one"))
                return
        super().on_body(body)

    def _forget_body(self) -> None:
        if self._body_bytes and self._peer is not None:
            _subtract(self._host.unfinished, self._peer.uid, self._body_bytes)
        self._body_bytes = 0

    def on_message_complete(self) -> None:
        self._forget_body()
        self._in_head = True  # the next byte begins another head
        _cancel(self._arrival)
        super().on_message_complete()

    def _expect_request(self, seconds: float) -> None:
        """Close the connection if no request has arrived by then. A body gets another `request_s` after its head."""
        _cancel(self._arrival)
        self._arrival = self.loop.call_later(seconds, self._close_late)

    def _close_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall)
        self._stall = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(Usage(msg, "this is an HTTP/1.1 socket; see `carma --help` and the API reference"))

    def _refuse(self, error: CarmaError) -> None:
        """Answer without the application, and close."""
        body = msgspec.json.encode(Problem(code=error.code, message=str(error), hint=error.hint))
        status = error.http_status
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _subtract(counts: Counter[int], uid: int, number: int) -> None:
    counts[uid] -= number
    if counts[uid] <= 0:
        del counts[uid]


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers (the daemon has its own) and without waking ten times per second to check a
    flag."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()


class HttpServer:
    """Serves `app` on `listener` until `stop()`. Streams have to end by themselves (Shell.release)."""

    def __init__(
        self, app: Starlette, listener: socket.socket, limits: HttpLimits, *, peer_of: PeerReader = read_peer
    ) -> None:
        self._listener = listener
        self.limits = limits
        self.peer_of = peer_of
        self.connections: Counter[int] = Counter()  # by uid, without refused connections
        self.unfinished: Counter[int] = Counter()  # by uid, bytes of bodies that are arriving
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], functools.partial(Connection, host=self)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # errors of a client are answered, not logged: a client must not be able to fill the log
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
        """Serve on another socket from now on. Must be running; open connections stay open."""
        before = self._uvicorn.servers
        await self._uvicorn.startup(sockets=[listener])
        for server in before:
            server.close()

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._uvicorn.stopping.set()
