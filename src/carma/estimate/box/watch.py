"""The inner half: the first process of the box. It builds the file system, starts the program and stands over it.

When it exits, the kernel ends every process in the box; it exits when the awaited file is there, when the program has
ended, at a limit, and when whoever ordered the box has gone. The program can neither signal nor trace it. What the
program left behind is copied out by descriptor, without following links and within bounds: it may be anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import time

from carma.estimate.box import command, kernel, special, usage
from carma.estimate.box.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PAUSE_S = 0.05  # between looks at limits and results
TAIL_BYTES = 16 * 1024  # of each of the two outputs
END_LIMIT_S = 5.0  # for processes to be gone after SIGKILL
START_BYTES = 256  # of a file that is waited for
NOTE_BYTES = 64  # a note is a number or a word
_MIB = 2**20
_RUN_BYTES = 640 * _MIB  # the results are bounded themselves, below this
_CHUNK = 1 << 16


def tell(fd: int, status: dict[str, Any]) -> None:
    data = json.dumps(status).encode("ascii")
    with contextlib.suppress(OSError):  # nobody listens any more
        while data:
            data = data[os.write(fd, data) :]


def stand_over(order: dict[str, Any]) -> NoReturn:
    """Never returns."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        tell(order["status_fd"], Box(order).run())
    except OSError as error:
        tell(order["status_fd"], {"ended": "refused", "why": error.strerror or str(error)})
    except BaseException as error:
        tell(order["status_fd"], {"ended": "refused", "why": repr(error)})
    os._exit(0)


class Box:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._limits = order["limits"]
        self._tails: dict[int, bytearray] = {}
        self._exit: int | None = None  # as waitpid has it

    def run(self) -> dict[str, Any]:
        tree = self._build()
        changes = tree.enter()
        kernel.die_with_parent(signal.SIGKILL)  # taking on another identity towards files had cleared it
        stores = [changes, *(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in ("/dev/shm", "/run"))]
        self._meter = usage.Meter(stores)
        self._out = os.open(special.OUT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._wake = wake_on_child()
        self._start()
        ended = self._wait()
        end_all()
        self._drain()
        output, error = (bytes(tail).decode("utf-8", "replace") for tail in self._tails.values())
        return {
            **ended,
            "stdout": output,
            "stderr": error,
            "notes": {name: read_note(self._out, name) for name in self._order["notes"]},
            "files": {name: self._copy(name, *entry) for name, entry in self._order["files"].items()},
            "read_only": tree.read_only,
            "peak_bytes": self._meter.peak_bytes,
        }

    def _build(self) -> Tree:
        tree = Tree(self._order)
        tree.build()
        special.empty_run(tree, _RUN_BYTES)
        special.make_own(tree, self._order)
        special.make_devices(tree, self._limits["memory_bytes"])
        special.make_sys(tree)
        special.make_proc(tree)
        return tree

    def _start(self) -> None:
        output, error, problem = os.pipe(), os.pipe(), os.pipe()
        self._child = os.fork()
        if self._child == 0:
            command.become(self._order, output[1], error[1], problem[1])
        kernel.hide_from_ptrace()
        os.close(problem[1])
        self._problem = os.read(problem[0], _CHUNK).decode("utf-8", "replace")  # ends at exec
        for reading, writing in (output, error):
            os.close(writing)
            os.set_blocking(reading, False)
            self._tails[reading] = bytearray()

    def _wait(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._limits["seconds"]
        poller = select.poll()
        for fd in (0, self._wake, *self._tails):
            poller.register(fd, select.POLLIN)
        looked_at = 0.0
        while True:
            for fd, _ in poller.poll(PAUSE_S * 1000):
                if fd == 0:
                    return {"ended": "abandoned"}
                if not self._take(fd) and fd in self._tails:
                    poller.unregister(fd)  # closed by all who had it
            self._reap()
            now = time.monotonic()
            if now < looked_at + PAUSE_S and self._exit is None:
                continue  # much is printed; looking is dearer than reading
            looked_at = now
            ended = self._look(deadline - now)
            if ended is not None:
                return ended

    def _look(self, left_s: float) -> dict[str, Any] | None:
        if starts_with(self._out, *self._order["await"]):
            return {"ended": "awaited"}
        if self._problem:
            return {"ended": "not_started", "why": self._problem}
        if self._exit is not None:
            return {"ended": "exit", "code": os.waitstatus_to_exitcode(self._exit)}
        if left_s <= 0:
            return {"ended": "time"}
        if self._meter.processes() > self._limits["processes"]:
            return {"ended": "processes"}
        if self._meter.exceeds(self._limits["memory_bytes"]):
            return {"ended": "memory"}
        return None

    def _reap(self) -> None:
        """Orphans of the whole box come to its first process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._exit = status

    def _take(self, fd: int) -> bool:
        """One piece, so that nobody who prints without end is all that is attended to."""
        try:
            piece = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if fd in self._tails:
            tail = self._tails[fd]
            tail += piece
            del tail[:-TAIL_BYTES]
        return bool(piece)

    def _drain(self) -> None:
        """What the pipes still hold; there is an end to it, as nobody writes any more."""
        for fd in self._tails:
            for _ in range(64):
                if not self._take(fd):
                    break

    def _copy(self, name: str, target: int, limit_bytes: int) -> int:
        """Bytes copied; -1 when there is no such file, -2 when it is larger than it may be."""
        try:
            source = open_plain(self._out, name)
        except OSError:
            return -1
        try:
            size = os.fstat(source).st_size
            if size > limit_bytes:
                return -2
            copied = 0
            while copied < size:
                sent = os.sendfile(target, source, copied, size - copied)
                if sent == 0:
                    break
                copied += sent
            return copied
        finally:
            os.close(source)


def wake_on_child() -> int:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def end_all() -> None:
    deadline = time.monotonic() + END_LIMIT_S
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        while time.monotonic() < deadline:
            os.kill(-1, signal.SIGKILL)  # all but this process
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
            time.sleep(0.001)


def starts_with(folder: int, name: str, pattern: str) -> bool:
    """Whether that file is there with the start that is waited for: other processes may leave lesser ones."""
    try:
        fd = open_plain(folder, name)
    except OSError:
        return False
    try:
        return re.search(pattern.encode(), os.read(fd, START_BYTES)) is not None
    finally:
        os.close(fd)


def open_plain(folder: int, name: str) -> int:
    """A regular file, whatever the program put there under that name."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is not a regular file")
    return fd


def read_note(folder: int, name: str) -> str | None:
    try:
        fd = open_plain(folder, name)
    except OSError:
        return None
    try:
        return os.read(fd, NOTE_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
