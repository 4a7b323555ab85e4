"""Starts daemons for tests by fork: one process imports CARMA once and forks for each daemon.

A daemon that is started as a program spends more than half a second of processor time on imports. The forked one runs
the same code with the same arguments, environment and files. Only what the kernel shows in /proc/PID/cmdline and
/proc/PID/environ differs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = "from tests.fork_server import serve; serve()"
_ROOT = Path(__file__).parents[1]


class Forked:
    """A daemon, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self.pid)

    def poll(self) -> int | None:
        self._server.receive(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout)
            self._server.receive(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    def __init__(self) -> None:
        self.codes: dict[int, int] = {}  # exit codes of daemons that have ended
        self._started: list[int] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join((str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM], stdin=theirs.fileno(), env={**os.environ, "PYTHONPATH": path}
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, flags: Sequence[str], environ: Mapping[str, str], log_file: Path) -> Forked:
        order = {"flags": list(flags), "environ": dict(environ), "log": str(log_file), "directory": os.getcwd()}
        self._socket.send(json.dumps(order).encode())
        while not self._started:
            assert self.alive, "the fork server ended"
            self.receive(1.0)
        return Forked(self, self._started.pop())

    def receive(self, limit_s: float) -> None:
        """Take one message, if there is one within this time."""
        self._socket.settimeout(limit_s)
        try:
            message = json.loads(self._socket.recv(1 << 16) or b"{}")
        except (BlockingIOError, TimeoutError):
            return
        if "started" in message:
            self._started.append(message["started"])
        elif "ended" in message:
            self.codes[message["ended"]] = message["code"]


def serve() -> None:
    """The fork server: forks on request, reports ends. Ends with the test process."""
    import select

    import carma.daemon.server
    import carma.vgpu.sampler
    import carma.vgpu.virtual_server  # noqa: F401 (imported once for all daemons)

    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([connection.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _report_ends(connection)
        if connection.fileno() in ready:
            data = connection.recv(1 << 20)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for spare in (connection.detach(), reader, writer):
                    os.close(spare)
                _run(json.loads(data))
            connection.send(json.dumps({"started": pid}).encode())


def _report_ends(connection: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _run(order: dict[str, Any]) -> None:
    """Runs in the child; never returns."""
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environ"])
        from carma.cli import main

        code = main(["up", *order["flags"]])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
