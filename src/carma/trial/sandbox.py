"""Runs a command in the sandbox (estimate/box) and says how it ended. The daemon's side: starts, waits, reads.

The sandbox is a process of its own. Nothing that the command does outlasts it, except files that it writes into `keep`.
Where the kernel does not allow sandboxes nothing is run. A run takes at most its time limit and GRACE_S: a sandbox that
does not end, because a file system hangs, is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from carma.cgroups import Cgroup
from carma.core.model.values import Owner
from carma.trial.box import main as box_program
from carma.trial.confinement import Confinement, confinement

OUT, INSIDE, KEEP = "/run/carma/out", "/run/carma/inside", "/run/carma/keep"
GRACE_S = 5.0  # beyond the time limit, for the sandbox to end and to report
ANSWER_LIMIT_S = 10.0  # for the mounts of the machine and the paths that the command names
READY_LIMIT_S = 30.0  # from the start until the command runs
_END_S = 1.0  # for the sandbox to be gone once it has reported
_UNANSWERED_S = 300.0  # a mount that did not answer is not asked again for this time
_WANTED = 200
_MIB = 2**20
_SYSTEMD_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True)
class Limits:
    seconds: float = 120.0
    memory_mib: int = 16_384  # of the host, including files that the command writes
    scratch_mib: int = 4_096  # of that: files that the command writes
    processes: int = 4_096  # threads count too
    keep_mib: int = 256  # of files in KEEP


@dataclass(frozen=True)
class Boxed:
    """What is to be run. `files` are copied out of OUT, with their limits in bytes; `notes` are small files there."""

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


Ending = Literal[
    "awaited",
    "exit",
    "time",
    "memory",
    "processes",
    "not_started",
    "refused",
    "failed",
    "unanswered",
    "abandoned",
    "lost",
]


class Status(msgspec.Struct):
    """How it ended, as the sandbox reports it.

    `refused`: the kernel does not allow sandboxes. `failed`: it could not be built for another reason. `unanswered`: a
    file system hangs; `why` is the path. `lost`: it reported nothing.
    """

    ended: Ending
    code: int = 0  # for `exit`: negative for a signal
    why: str = ""
    stdout: str = ""  # the end of it
    stderr: str = ""
    notes: dict[str, str | None] = {}
    files: dict[str, int] = {}  # bytes; -1 where there is none, -2 where it is too large
    read_only: list[str] = []
    unanswered: list[str] = []  # mounts that hang; they are empty in the sandbox
    limit_s: float = 0.0  # for `unanswered`: how long was waited


class _Line(msgspec.Struct):
    """What the sandbox reports while it runs (box/watch.py, Reporter)."""

    at: str | None = None
    first: int = 0
    ended: str = ""


@dataclass(frozen=True)
class Ended:
    status: Status
    files: dict[str, bytes]  # those that there were
    seconds: float


@dataclass
class Sandbox:
    """Runs commands from any thread. `close` ends all that are running; none starts after it."""

    launcher: Sequence[str] = (sys.executable, "-I", "-S", "-X", "utf8", box_program.__file__)
    confinement: Confinement | None = None  # None: what this machine has
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def run(self, what: Boxed) -> Ended:
        means = confinement() if self.confinement is None else self.confinement
        begun = time.monotonic()
        limits = (what.limits.processes, what.limits.memory_mib * _MIB)
        with contextlib.ExitStack() as stack:
            memories = {name: _memory(stack, name) for name in what.files}
            complaints = _memory(stack, "complaints")
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            group = stack.enter_context(means.cgroup(*limits))
            try:
                process = self._start(means.prefix(*limits), writing, memories, complaints)
            finally:
                os.close(writing)
            if process is None:
                return Ended(Status(ended="abandoned"), {}, 0.0)
            order = _order(what, writing, memories, begun) | _confined(means, group)
            talk = _Talk(process, reading)
            try:
                talk.hold(json.dumps(order).encode("ascii") + b"\n", begun, what.limits.seconds)
            finally:
                self._end(process, talk)
            status = self._status(talk, complaints)
            files = {name: _contents(fd) for name, fd in memories.items() if status.files.get(name, -1) >= 0}
        return Ended(status, files, time.monotonic() - begun)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()  # the kernel then kills pid 1 of the sandbox, and with it everything in the sandbox

    def _start(
        self, prefix: Sequence[str], status_fd: int, memories: Mapping[str, int], complaints: int
    ) -> subprocess.Popen[bytes] | None:
        kept = {name: os.environ[name] for name in _SYSTEMD_VARIABLES if prefix and name in os.environ}
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                [*prefix, *self.launcher],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=(status_fd, *memories.values()),
                cwd="/",
                env={"PATH": os.defpath, **kept},
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes], talk: _Talk) -> None:
        """Pid 1 of the sandbox ends with its parent. A parent inside a file system that hangs does not end, so that
        pid 1 is killed directly."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if talk.status is None else _END_S)
        with self._lock:
            self._running.discard(process)
        if process.poll() is None and talk.first and _parent_of(talk.first) == process.pid:
            with contextlib.suppress(OSError):
                os.kill(talk.first, signal.SIGKILL)
        process.kill()
        _leave_behind(process)

    def _status(self, talk: _Talk, complaints: int) -> Status:
        if talk.status is not None:
            with _left_lock:
                _unanswered.update(dict.fromkeys(talk.status.unanswered, time.monotonic() + _UNANSWERED_S))
            return talk.status
        if self._closed:
            return Status(ended="abandoned")
        if talk.late:
            stuck = Status(ended="unanswered", why=talk.at, limit_s=talk.limit_s)
            return stuck if talk.at else Status(ended="time")
        last = _contents(complaints)[-2000:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Status(ended="lost", why=last)


_left_lock = threading.Lock()
_left: list[subprocess.Popen[bytes]] = []  # processes that did not end in time
_unanswered: dict[str, float] = {}  # mounts that hang, and when they may be asked again


def _leave_behind(process: subprocess.Popen[bytes]) -> None:
    """Waits briefly; a process that cannot end now is reaped by a later call."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with _left_lock:
        _left[:] = [other for other in (*_left, process) if other.poll() is None]


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return 0


def _known_unanswered() -> list[str]:
    now = time.monotonic()
    with _left_lock:
        return [path for path, until in _unanswered.items() if now < until]


class _Talk:
    """What goes to the sandbox and what it reports."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int) -> None:
        self._process = process
        self._reading = reading
        self.at = "the start of the sandbox"  # empty once the command runs
        self.first = 0  # pid 1 of the sandbox, as it is called out here
        self.status: Status | None = None
        self.limit_s = 0.0
        self.late = False

    def hold(self, order: bytes, begun: float, limit_s: float) -> None:
        """Gives the order and reads until the sandbox has reported its end, or is late. Standard input stays open for
        as long: when it closes, the sandbox ends."""
        self._send(order)
        rest = b""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        while self.status is None:
            self.limit_s = limit_s + GRACE_S
            if self.at:
                self.limit_s = min(self.limit_s, READY_LIMIT_S)
            left_s = begun + self.limit_s - time.monotonic()
            if left_s <= 0:
                self.late = True
                return
            if not poller.poll(left_s * 1000):
                continue
            piece = os.read(self._reading, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._take(line)

    def _send(self, order: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and reports nothing
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def _take(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            told = msgspec.json.decode(line, type=_Line)
            if told.at is not None:
                self.at = told.at
            self.first = told.first or self.first
            if told.ended:
                self.status = msgspec.json.decode(line, type=Status)


def _memory(stack: contextlib.ExitStack, name: str) -> int:
    """A file without a name, gone with its last descriptor: the box fills it, whoever it runs as."""
    fd = os.memfd_create(f"carma-{name}", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _confined(means: Confinement, group: Cgroup | None) -> dict[str, object]:
    return {
        "cgroup": [] if group is None else list(group.directories),
        "scope": means.scope is not None,
        "limited_by_kernel": means.complete and (means.scope is not None or group is not None),
    }


def _order(what: Boxed, status_fd: int, memories: Mapping[str, int], begun: float) -> dict[str, object]:
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
        "unanswered": _known_unanswered(),
        "deadline": begun + what.limits.seconds,  # by CLOCK_MONOTONIC, which all processes share
        "limits": {
            "memory_bytes": what.limits.memory_mib * _MIB,
            "scratch_bytes": what.limits.scratch_mib * _MIB,
            "processes": what.limits.processes,
            "keep_bytes": what.limits.keep_mib * _MIB,
            "answer_s": ANSWER_LIMIT_S,
        },
    }


def _wanted(what: Boxed) -> list[str]:
    """Where the command may want to write: where it stands, its home, and the paths that it is given."""
    given = [word.partition("=")[2] or word for word in what.command]
    paths = [what.directory, what.environment.get("HOME", ""), "/tmp", "/var/tmp", *what.environment.values(), *given]
    joined = (os.path.normpath(os.path.join(what.directory, path)) for path in paths if "/" in path and ":" not in path)
    return list(dict.fromkeys(path for path in joined if "\0" not in path and len(path) < 4096))[:_WANTED]


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
