"""The socket's file: created with its final rights, restored when it was removed.

A listener is not told when its file is removed, so the file is checked every few seconds. A program that cleans up a
directory must not make the daemon unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path

from carma.daemon.http.http_server import HttpServer
from carma.errors import AlreadyRunning, BadSettings, CarmaError
from carma.store.store_errors import hint_of, reason_of
from carma.transport import has_listener

log = logging.getLogger("carma.daemon")

CHECK_S = 2.0
SAME_PROBLEM_CHECKS = 30  # an address that cannot be restored is logged this often
_PATH_LIMIT = 107  # sockaddr_un.sun_path without its NUL


def _refuse_if_alive(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadSettings(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise BadSettings(f"{path} exists and is not a socket", "move it away, or choose another CARMA_HOME")
    if has_listener(path):
        raise AlreadyRunning(f"another daemon answers on {path}", "`carma down` ends it")


class Address:
    """Where the daemon listens. The file is identified by its inode, which is not used again while it is open."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._ours: tuple[int, int] | None = None

    def bind(self) -> socket.socket:
        """A listening socket. Replaces the file of a daemon that has ended; raises AlreadyRunning if one listens.

        The socket is created under another name, gets its mode, and is then renamed: it is never reachable with other
        rights.
        """
        fresh = self.path.with_name(f".{os.getpid()}")
        if max(len(os.fsencode(name)) for name in (self.path, fresh)) > _PATH_LIMIT:
            raise BadSettings(
                f"the socket's path is too long: {self.path}",
                f"a Unix socket takes {_PATH_LIMIT} bytes; choose a shorter CARMA_HOME",
            )
        _refuse_if_alive(self.path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fresh.unlink(missing_ok=True)
            made.bind(str(fresh))
            os.chmod(fresh, self._mode)
            made.listen(1024)
            os.rename(fresh, self.path)
        except OSError as error:
            made.close()
            with contextlib.suppress(OSError):
                fresh.unlink()
            message = f"the socket {self.path} cannot be created: {reason_of(error)}"
            raise BadSettings(message, hint_of(error)) from error
        made.setblocking(False)
        self._ours = self._found()
        return made

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


async def keep_reachable(address: Address, server: HttpServer, check_s: float = CHECK_S) -> None:
    """While the daemon runs. Open connections stay open."""
    failures = 0
    while True:
        await asyncio.sleep(check_s)
        if address.is_ours():
            failures = 0
            continue
        try:
            await server.move_to(address.bind())
            log.warning("the socket %s was removed and has been created again", address.path)
        except (CarmaError, OSError) as error:
            if failures % SAME_PROBLEM_CHECKS == 0:
                log.error("the socket %s was removed and cannot be created again: %s", address.path, error)
            failures += 1
