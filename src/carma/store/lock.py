"""One daemon per database: two locks, held while the store is open. The kernel releases both with the process.

1. A lock on a file beside the database. The file is never deleted; otherwise two processes could lock two files of the
   same name.
2. An abstract Unix socket whose name is derived from the path of the database. It is still held after the directory was
   deleted and created again: the new daemon waits until the old one has noticed that and ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from hashlib import blake2b
from pathlib import Path

from carma.errors import AlreadyRunning
from carma.store.store_errors import from_os

_PEERCRED = struct.Struct("3i")
_PAUSE_S = 0.02
_NAME_PAUSE_S = 0.2
_BACKLOG = 128  # each check of the holder's credentials leaves a connection that is never accepted


class HomeLock:
    """Held from construction until `release`. The constructor waits a moment, because a killed daemon may still be
    closing its files; some seconds if only a process is left that it was just starting; and a daemon whose directory
    was deleted needs some seconds to notice."""

    def __init__(self, path: Path, patience_s: float = 1.0, name_patience_s: float = 15.0) -> None:
        self.path = path
        self._descriptor = -1
        self._name: socket.socket | None = None
        try:
            # O_CLOEXEC is Python's default: a task that outlives the daemon must not inherit the lock.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._lock_file(time.monotonic(), patience_s, name_patience_s)
            self._take_name(time.monotonic() + name_patience_s)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise from_os(error, path, "lock") from error
            raise

    def _lock_file(self, began_s: float, patience_s: float, most_s: float) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pid, _, host = os.pread(self._descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
                left = host == socket.gethostname() and not _lives(pid)
                if time.monotonic() >= began_s + (most_s if left else patience_s):
                    raise self._already_running(pid, host) from None
            time.sleep(_PAUSE_S)

    def _take_name(self, deadline_s: float) -> None:
        name = b"\0carma-" + blake2b(os.fsencode(os.path.realpath(self.path)), digest_size=16).hexdigest().encode()
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                self._name.bind(name)
                self._name.listen(_BACKLOG)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return  # abstract sockets are not available: the file lock must suffice
            pid = _holder_of_name(name)
            if pid == 0:
                return  # another user took the name, perhaps to keep this daemon from starting
            if time.monotonic() >= deadline_s:
                raise self._already_running("" if pid is None else str(pid), "")
            time.sleep(_NAME_PAUSE_S)

    def _already_running(self, pid: str, host: str) -> AlreadyRunning:
        where = f" on {host}" if host and host != socket.gethostname() else ""
        who = f"process {pid}{where}" if pid else "another process"
        return AlreadyRunning(
            f"{self.path.parent} is already served by a daemon ({who})",
            "Use it as it is, end it with `carma down`, or set CARMA_HOME to another directory.",
        )

    def release(self) -> None:
        """Calling it again has no effect."""
        if self._name is not None:
            self._name.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True


def _holder_of_name(name: bytes) -> int | None:
    """The process that listens under that name; None if it is gone, 0 if it belongs to another user or is unknown."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as client:
        client.setblocking(False)
        try:
            client.connect(name)
            raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        except BlockingIOError:  # its backlog is full
            return 0
        except OSError:
            return None
    pid, uid, _ = _PEERCRED.unpack(raw)
    return pid if uid in (0, os.geteuid()) else 0
