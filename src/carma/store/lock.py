"""One daemon for one database: a lock file beside it, held as long as the store is open.

The kernel drops the lock with the process, however that ends, so there is no stale lock to clean up. The file itself
stays; removing it would let two processes lock two different files of the same name.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from carma.errors import AlreadyRunning
from carma.store.problems import from_os


class HomeLock:
    """Held from construction until `release`. Waits a moment first: a daemon that was just killed may still be
    closing its files."""

    def __init__(self, path: Path, patience_s: float = 1.0) -> None:
        self.path = path
        try:
            # O_CLOEXEC is Python's default: a task that outlives the daemon must not inherit the lock.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise from_os(error, path, "lock") from error
        try:
            self._acquire(time.monotonic() + patience_s)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise from_os(error, path, "lock") from error
        except AlreadyRunning:
            os.close(self._descriptor)
            raise

    def _acquire(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._taken() from None
            time.sleep(0.02)

    def _taken(self) -> AlreadyRunning:
        pid, _, host = os.pread(self._descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
        where = f" on {host}" if host and host != socket.gethostname() else ""
        who = f"process {pid}{where}" if pid else "another process"
        return AlreadyRunning(
            f"{self.path.parent} is already served by a daemon ({who})",
            "Use it as it is, end it with `carma down`, or set CARMA_HOME to another directory.",
        )

    def release(self) -> None:
        """Twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
