"""Runs a command in the sandbox (trial/box) and reports how it ended. This is the side of the caller.

The sandbox is a process of its own. Nothing that the command does outlives it, except files that it writes into `keep`.
Where the kernel allows no sandbox, nothing runs. A run takes at most its time limit and GRACE_S: a sandbox that cannot
end because a file system hangs is abandoned.
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
from typing import Any, Literal

import msgspec

from carma import procfs
from carma.cgroups import Cgroup
from carma.core.model.values import Owner
from carma.trial.box import main as box_program
from carma.trial.kernel_limits import KernelLimits, kernel_limits

GRACE_S = 5.0  # beyond the time limit, for the sandbox to end and to report
ANSWER_LIMIT_S = 10.0  # for the mounts of the machine and the paths that the command names
READY_LIMIT_S = 30.0  # from the start until the command runs
_END_S = 1.0  # for the sandbox to be gone after its report
_RETRY_MOUNT_S = 300.0  # time for which a mount that did not answer is left out without asking it
_WANTED_PATHS = 200
_MIB = 2**20
_SYSTEMD_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True)
class SandboxLimits:
    seconds: float = 120.0
    memory_mib: int = 16_384  # of the host, including files that the command writes
    scratch_mib: int = 4_096  # of that: files that the command writes
    processes: int = 4_096  # threads count too
    keep_mib: int = 256  # of files in KEEP


@dataclass(frozen=True)
class SandboxRun:
    """One command to run. `files` are copied out of OUT, with their limits in bytes; `notes` are small files there."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    owner: Owner | None  # None: the user that runs this process
    inside: str  # a directory of CARMA that the command finds at INSIDE
    awaited: tuple[str, str]  # the file in OUT that ends the run, and a pattern for its first bytes
    files: Mapping[str, int]
    notes: Sequence[str] = ()
    umask: int = 0o022
    keep: str | None = None  # a directory of the owner, at KEEP in the sandbox, which the command may change
    limits: SandboxLimits = SandboxLimits()


Ending = Literal[
    "awaited", "exit", "time", "memory", "processes", "not_started", "refused", "failed", "unanswered", "abandoned",
    "lost",
]  # fmt: skip


class SandboxStatus(msgspec.Struct):
    """How a run ended, as the sandbox reports it.

    `refused`: the kernel allows no sandbox. `failed`: the sandbox could not be built for another reason.
    `memory`: `why` is what may belong to other programs. `unanswered`: a file system hangs; `why` is the path.
    `lost`: the sandbox reported nothing.
    """

    ended: Ending
    code: int = 0  # for `exit`: negative for a signal
    why: str = ""
    stdout: str = ""  # the end of it
    stderr: str = ""
    notes: dict[str, str | None] = {}
    files: dict[str, int] = {}  # bytes; -1: does not exist, -2: too large
    read_only: list[str] = []
    unanswered: list[str] = []  # mounts that hang; they are empty in the sandbox
    limit_s: float = 0.0  # for `unanswered`: the time waited


@dataclass(frozen=True)
class SandboxResult:
    status: SandboxStatus
    files: dict[str, bytes]  # those that exist
    seconds: float


@dataclass(eq=False)
class Sandbox:
    """Runs commands from any thread. `close` ends all runs; none starts after it."""

    launcher: Sequence[str] = (sys.executable, "-I", "-S", "-X", "utf8", box_program.__file__)
    kernel_limits: KernelLimits | None = None  # None: what this machine has
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def run(self, what: SandboxRun) -> SandboxResult:
        limiter = kernel_limits() if self.kernel_limits is None else self.kernel_limits
        started_s = time.monotonic()
        limits = (what.limits.processes, what.limits.memory_mib * _MIB)
        with contextlib.ExitStack() as stack:
            outputs = {name: _memory_file(stack, name) for name in what.files}
            errors = _memory_file(stack, "errors")
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            group = stack.enter_context(limiter.cgroup(*limits))
            try:
                process = self._start(limiter.prefix(*limits), (writing, *outputs.values()), errors)
            finally:
                os.close(writing)
            if process is None:
                return SandboxResult(SandboxStatus(ended="abandoned"), {}, 0.0)
            order = _order(what, writing, outputs, started_s) | _confined(limiter, group)
            channel = _Channel(process, reading)
            try:
                channel.run(json.dumps(order).encode("ascii") + b"\n", started_s, what.limits.seconds)
            finally:
                self._end(process, channel)
            status = self._status(channel, errors)
            files = {name: _contents(fd) for name, fd in outputs.items() if status.files.get(name, -1) >= 0}
        return SandboxResult(status, files, time.monotonic() - started_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()  # the kernel then kills pid 1 of the sandbox, and with it everything in the sandbox

    def _start(self, prefix: Sequence[str], inherited: Sequence[int], errors: int) -> subprocess.Popen[bytes] | None:
        systemd = {name: os.environ[name] for name in _SYSTEMD_VARIABLES if prefix and name in os.environ}
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                [*prefix, *self.launcher],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=inherited,
                cwd="/",
                env={"PATH": os.defpath, **systemd},
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes], channel: _Channel) -> None:
        """Pid 1 of the sandbox ends with its parent. A parent inside a file system that hangs does not end, so that
        pid 1 is killed directly."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if channel.status is None else _END_S)
        with self._lock:
            self._running.discard(process)
        with contextlib.suppress(OSError):
            first = procfs.process(channel.first) if process.poll() is None and channel.first else None
            if first is not None and first.parent == process.pid:
                os.kill(first.pid, signal.SIGKILL)
        process.kill()
        _reap_or_abandon(process)

    def _status(self, channel: _Channel, errors: int) -> SandboxStatus:
        if channel.status is not None:
            with _abandoned_lock:
                until_s = time.monotonic() + _RETRY_MOUNT_S
                _unanswered_until_s.update(dict.fromkeys(channel.status.unanswered, until_s))
            return channel.status
        if self._closed:
            return SandboxStatus(ended="abandoned")
        if channel.late:
            if channel.at:
                return SandboxStatus(ended="unanswered", why=channel.at, limit_s=channel.limit_s)
            return SandboxStatus(ended="time")
        last_line = _contents(errors)[-2000:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        return SandboxStatus(ended="lost", why=last_line)


_abandoned_lock = threading.Lock()
_abandoned: list[subprocess.Popen[bytes]] = []  # processes that did not end in time
_unanswered_until_s: dict[str, float] = {}  # by mount


def _reap_or_abandon(process: subprocess.Popen[bytes]) -> None:
    """Waits briefly; a process that cannot end now is reaped by a later call."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with _abandoned_lock:
        _abandoned[:] = [other for other in (*_abandoned, process) if other.poll() is None]


class _Channel:
    """Sends the order to the sandbox and reads what it reports (box/supervisor.py, report)."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int) -> None:
        self._process = process
        self._reading = reading
        self.at = "the start of the sandbox"  # what the sandbox waits for; empty once the command runs
        self.first = 0  # pid 1 of the sandbox, as the host numbers it
        self.status: SandboxStatus | None = None
        self.limit_s = 0.0
        self.late = False

    def run(self, order: bytes, started_s: float, limit_s: float) -> None:
        """Returns when the sandbox has reported its end, or is late. Standard input stays open until then: when it
        closes, the sandbox ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and reports nothing
            self._process.stdin.write(order)
            self._process.stdin.flush()
        rest = b""
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        while self.status is None:
            self.limit_s = limit_s + GRACE_S
            if self.at:
                self.limit_s = min(self.limit_s, READY_LIMIT_S)
            left_s = started_s + self.limit_s - time.monotonic()
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

    def _take(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            message = msgspec.json.decode(line, type=dict[str, Any])
            self.at = message.get("at", self.at)
            self.first = message.get("first", self.first)
            if "ended" in message:
                self.status = msgspec.convert(message, SandboxStatus)


def _memory_file(stack: contextlib.ExitStack, name: str) -> int:
    """A file without a path, gone with its last descriptor: the sandbox fills it, as any user."""
    fd = os.memfd_create(f"carma-{name}", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _confined(limiter: KernelLimits, group: Cgroup | None) -> dict[str, object]:
    return {
        "cgroup": [] if group is None else list(group.directories),
        "scope": limiter.scope is not None,
        "limited_by_kernel": limiter.complete and (limiter.scope is not None or group is not None),
    }


def _order(what: SandboxRun, status_fd: int, outputs: Mapping[str, int], started_s: float) -> dict[str, object]:
    with _abandoned_lock:
        unanswered = [path for path, until_s in _unanswered_until_s.items() if time.monotonic() < until_s]
    order: dict[str, object] = msgspec.to_builtins(what)
    return order | {
        "identity": order["owner"] if os.geteuid() == 0 else None,
        "wanted": _wanted_paths(what),
        "files": {name: [fd, what.files[name]] for name, fd in outputs.items()},
        "status_fd": status_fd,
        "unanswered": unanswered,
        "deadline": started_s + what.limits.seconds,  # by CLOCK_MONOTONIC, which all processes share
        "answer_s": ANSWER_LIMIT_S,
    }


def _wanted_paths(what: SandboxRun) -> list[str]:
    """Paths to which the command may want to write: its working directory, its home, and the paths that it is given."""
    arguments = [word.partition("=")[2] or word for word in what.command]
    environment = what.environment
    paths = [what.directory, environment.get("HOME", ""), "/tmp", "/var/tmp", *environment.values(), *arguments]
    joined = (os.path.normpath(os.path.join(what.directory, path)) for path in paths if "/" in path and ":" not in path)
    return list(dict.fromkeys(path for path in joined if "\0" not in path and len(path) < 4096))[:_WANTED_PATHS]


def _contents(fd: int) -> bytes:
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()
