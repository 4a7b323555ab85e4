"""The socket's place in the file system, kept: whoever cleans up a directory must not make the daemon unreachable.

Nothing tells a listener that its file was removed, so it is looked at every few seconds and made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from carma.daemon.http.server import HttpServer, bind
from carma.errors import CarmaError

log = logging.getLogger("carma.daemon")

LOOK_S = 2.0
SAME_PROBLEM_LOOKS = 30  # a place that cannot be taken back is complained about this often


class Address:
    """Where the daemon listens. The file is known by its inode, which is not used again while we listen on it."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._ours: tuple[int, int] | None = None

    def bind(self) -> socket.socket:
        listener = bind(self.path, self._mode)
        self._ours = self._found()
        return listener

    def is_ours(self) -> bool:
        return self._ours is not None and self._found() == self._ours

    def remove(self) -> None:
        if self.is_ours():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


async def keep_reachable(address: Address, server: HttpServer, look_s: float = LOOK_S) -> None:
    """For as long as the daemon runs. Connections that are open stay open."""
    failures = 0
    while True:
        await asyncio.sleep(look_s)
        if address.is_ours():
            failures = 0
            continue
        try:
            await server.move_to(address.bind())
            log.warning("the socket %s was gone and has been made again", address.path)
        except (CarmaError, OSError) as error:
            if failures % SAME_PROBLEM_LOOKS == 0:
                log.error("the socket %s is gone and cannot be made again: %s", address.path, error)
            failures += 1
