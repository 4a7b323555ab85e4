"""The Prometheus endpoint: GET /metrics on a loopback address, off by default.

1. It listens on loopback only. A browser that a foreign page sends here (DNS rebinding) is refused by its Host header.
2. With a token file, a request needs `Authorization: Bearer TOKEN`: every user of the machine can reach loopback.
3. The state is read at most once per second, and for at most a twentieth of the time, however many clients ask. The
   text is made in a thread.

It must not serve anything else, and no error of it may end the daemon.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from ipaddress import ip_address
from urllib.parse import urlsplit

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from carma.config.settings_tree import Metrics
from carma.daemon.auth import Peer
from carma.daemon.http.http_server import HttpLimits, HttpServer
from carma.daemon.metrics.exposition import Counts, Exposition
from carma.daemon.metrics.readings import Reading, read
from carma.daemon.runtime import BackgroundThread
from carma.daemon.shell import Shell
from carma.daemon.trusted_file import read_trusted
from carma.errors import BadSettings

log = logging.getLogger("carma.daemon")

READABLE_BY_ALL = 0o004  # not by its group, which may be that of a Prometheus on this machine
FRESH_S = 1.0
PAUSE_FACTOR = 20.0  # readings are not taken again for this many times as long as they took
NO_USER = Peer(-1, -1, -1)  # TCP does not say who connects, and root's exemption from the limits must not apply
LIMITS = HttpLimits(connections=32, connections_per_user=32, request_s=5.0)


class MetricsEndpoint:
    def __init__(self, shell: Shell, settings: Metrics) -> None:
        """Raises BadSettings, or OSError if the address cannot be used."""
        self._shell = shell
        self._token = read_token(settings.token_file)
        self._listener = _listen(loopback_address(settings.listen))
        self._counts = shell.recorder = Counts()
        self._thread = BackgroundThread("metrics")
        self._turn = asyncio.Lock()
        self._readings: list[Reading] = []
        self._texts: dict[str, bytes] = {}  # of these readings, by content type
        self._read_again_at_s = 0.0
        app = Starlette(routes=[Route("/metrics", self._answer)])
        self._server = HttpServer(app, self._listener, LIMITS, peer_of=lambda _socket: NO_USER)
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Serves until it is cancelled."""
        serving = asyncio.create_task(self._server.run())
        log.info("metrics are at http://%s:%d/metrics", *self._listener.getsockname()[:2])
        try:
            await asyncio.shield(serving)
        finally:
            self._server.stop()
            self._thread.close(wait_s=0.0)
            await serving

    async def _answer(self, request: Request) -> Response:
        if not is_loopback(request.headers.get("host", "")):
            return PlainTextResponse("the Host header is not that of this machine's loopback address\n", 403)
        if self._token and not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._token):
            headers = {"www-authenticate": "Bearer"}
            return PlainTextResponse("the token is missing or wrong (metrics.token_file)\n", 401, headers)
        body, content_type = await self._text(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _text(self, accept: str) -> tuple[bytes, str]:
        async with self._turn:
            began_s = time.monotonic()
            if began_s >= self._read_again_at_s:
                self._texts, self._readings = {}, read(self._shell.state, self._shell.clock.now())
                self._read_again_at_s = began_s + max(FRESH_S, PAUSE_FACTOR * (time.monotonic() - began_s))
            encode, content_type = choose_encoder(accept)
            if content_type not in self._texts:
                metrics = Exposition(self._readings, self._counts)
                self._texts[content_type] = await self._thread.call(lambda: encode(metrics))
            return self._texts[content_type], content_type


def loopback_address(listen: str) -> tuple[str, int]:
    """`127.0.0.1:9177`, `[::1]:9177` or `localhost:9177`. Raises BadSettings."""
    problem = f"metrics.listen = {listen!r}"
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise BadSettings(f"{problem} is not an address with a port", "write for example 127.0.0.1:9177")
    if not is_loopback(listen):
        raise BadSettings(
            f"{problem} is refused, because the address is not loopback: the endpoint has no encryption, and its "
            "metrics name users and their tasks",
            "listen on 127.0.0.1:9177, and let a Prometheus agent or a proxy with TLS on this machine pass them on",
        )
    return ("127.0.0.1" if host == "localhost" else host), port


def is_loopback(netloc: str) -> bool:
    """Of a Host header or an address, with or without a port."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: str) -> bytes:
    """The Authorization header of a permitted request; empty: none is needed. Raises BadSettings."""
    if not file:
        return b""
    token = read_trusted("metrics.token_file", file, READABLE_BY_ALL).strip()
    if not token:
        raise BadSettings(f"metrics.token_file {file} is empty", "for example: openssl rand -hex 32")
    return b"Bearer " + os.fsencode(token)


def _listen(address: tuple[str, int]) -> socket.socket:
    listener = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    listener.setblocking(False)
    return listener
