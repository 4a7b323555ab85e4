"""Runs a command in a box (estimate/box) and tells how it ended. The daemon's side: starts, waits, reads.

The box is a process of its own with its own view of the machine; nothing that the command does outlasts it, apart from
what it writes into `keep`. Where the kernel does not allow boxes, nothing is run: there is no second, laxer way.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from carma.core.model import Owner
from carma.estimate.box import run as box_program

OUT, INSIDE, KEEP = "/run/carma/out", "/run/carma/inside", "/run/carma/keep"
_GRACE_S = 30.0  # beyond its own time limit, for a box that does not answer
_END_S = 10.0  # for the box to be gone once it has told
_WANTED = 200
_MIB = 2**20


@dataclass(frozen=True)
class Limits:
    seconds: float = 120.0
    memory_mib: int = 16_384  # of the host, what is written to files included
    scratch_mib: int = 4_096  # of that: files that the command writes
    processes: int = 1_024


@dataclass(frozen=True)
class Boxed:
    """What is to be run. `files` are taken out of OUT with their limits in bytes; `notes` are small files there."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    owner: Owner | None  # None: whoever runs this
    inside: str  # a folder of ours that the command finds at INSIDE
    awaited: tuple[str, str]  # the file in OUT that ends the run, and what must be found at its start (an expression)
    files: Mapping[str, int]
    notes: Sequence[str] = ()
    umask: int = 0o022
    keep: str | None = None  # a folder of the owner's that it finds at KEEP and may change
    limits: Limits = Limits()


Ending = Literal["awaited", "exit", "time", "memory", "processes", "not_started", "refused", "abandoned", "lost"]


class Status(msgspec.Struct):
    """How it ended, as the box tells it. `lost`: it did not tell."""

    ended: Ending
    code: int = 0  # for `exit`: negative for a signal
    why: str = ""
    stdout: str = ""  # the last of it
    stderr: str = ""
    notes: dict[str, str | None] = {}
    files: dict[str, int] = {}  # bytes; -1 where there is none, -2 where it is too large
    read_only: list[str] = []
    peak_bytes: int = 0


@dataclass(frozen=True)
class Ended:
    status: Status
    files: dict[str, bytes]  # those that there were
    seconds: float


@dataclass
class Sandbox:
    """Runs boxes from any thread. `close` ends all that are running; none starts after it."""

    launcher: Sequence[str] = (sys.executable, "-I", "-S", "-X", "utf8", box_program.__file__)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def run(self, what: Boxed) -> Ended:
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            memories = {name: _memory(stack, name) for name in what.files}
            complaints = _memory(stack, "complaints")
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            try:
                process = self._start(writing, memories, complaints)
            finally:
                os.close(writing)
            if process is None:
                return Ended(Status(ended="abandoned"), {}, 0.0)
            try:
                order = json.dumps(_order(what, writing, memories)).encode("ascii") + b"\n"
                told = _exchange(process, order, reading, what.limits.seconds + _GRACE_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S if told else 0)  # until the kernel has cleared the box
            finally:
                self._end(process)
            status = _status(told, complaints)
            if status.ended == "lost" and self._closed:
                status = Status(ended="abandoned")
            files = {name: _contents(fd) for name, fd in memories.items() if status.files.get(name, -1) >= 0}
        return Ended(status, files, time.monotonic() - begun)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()  # the box's first process goes with it, and everything in the box with that

    def _start(self, status_fd: int, memories: Mapping[str, int], complaints: int) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                self.launcher,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=(status_fd, *memories.values()),
                cwd="/",
                env={"PATH": os.defpath},
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a file system that hangs: left behind
            process.wait(_END_S)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _memory(stack: contextlib.ExitStack, name: str) -> int:
    """A file without a name, gone with its last descriptor: the box fills it, whoever it runs as."""
    fd = os.memfd_create(f"carma-{name}", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _order(what: Boxed, status_fd: int, memories: Mapping[str, int]) -> dict[str, object]:
    owner = what.owner if what.owner is not None and os.geteuid() == 0 else None
    environment = dict(what.environment)
    return {
        "command": list(what.command),
        "directory": what.directory,
        "environment": environment,
        "umask": what.umask,
        "identity": None if owner is None else {"uid": owner.uid, "gid": owner.gid, "name": owner.name},
        "wanted": _wanted(what),
        "inside": what.inside,
        "keep": what.keep,
        "await": list(what.awaited),
        "notes": list(what.notes),
        "files": {name: [fd, what.files[name]] for name, fd in memories.items()},
        "status_fd": status_fd,
        "limits": {
            "seconds": what.limits.seconds,
            "memory_bytes": what.limits.memory_mib * _MIB,
            "scratch_bytes": what.limits.scratch_mib * _MIB,
            "processes": what.limits.processes,
        },
    }


def _wanted(what: Boxed) -> list[str]:
    """Where the command may want to write: where it stands, its home, and the paths that it is given."""
    given = [word.partition("=")[2] or word for word in what.command]
    paths = [what.directory, what.environment.get("HOME", ""), "/tmp", "/var/tmp", *what.environment.values(), *given]
    joined = (os.path.normpath(os.path.join(what.directory, path)) for path in paths if "/" in path and ":" not in path)
    return list(dict.fromkeys(path for path in joined if "\0" not in path and len(path) < 4096))[:_WANTED]


def _exchange(process: subprocess.Popen[bytes], order: bytes, reading: int, limit_s: float) -> bytes:
    """Gives the order and reads until the box has closed its end; standard input stays open for as long."""
    assert process.stdin is not None
    try:
        process.stdin.write(order)
        process.stdin.flush()
    except BrokenPipeError:  # it was killed; the status will be empty
        pass
    deadline = time.monotonic() + limit_s
    pieces = []
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if poller.poll(left_s * 1000):
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            pieces.append(piece)
    return b"".join(pieces)


def _status(told: bytes, complaints: int) -> Status:
    try:
        return msgspec.json.decode(told, type=Status)
    except msgspec.MsgspecError:
        last = _contents(complaints)[-2000:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Status(ended="lost", why=last)


def _contents(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    pieces, at = [], 0
    while at < size:
        piece = os.pread(fd, size - at, at)
        if not piece:
            break
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
