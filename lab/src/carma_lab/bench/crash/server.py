"""The daemon under test: a home of its own, starts, kills, and its processes as /proc shows them.

1. Starts a daemon within about 0.1 s, by a fork of a process that has loaded all modules; or cold, as `carma up`.
2. Signals it, and reports an end that was not requested.
3. Finds the runner and the command of every living attempt.

It relies on the public API and on /proc only, not on the files of an attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from carma import procfs
from carma.client import Client
from carma.errors import CarmaError
from carma.paths import find_paths
from carma.procfs import Process
from carma.testing.private_daemon import private_environment

GPUS = 16
LIMIT_S = 120.0  # for what takes far less than a second unless something is broken
MARK = "BENCH_CRASH_HOME"  # in the environment of every command, with the home as its value
PAUSE_S = 0.002

# Loads everything once and forks a daemon for each line that it reads: the same code and the same files as `carma up`.
FORK_SERVER = """
import os, sys
import carma.daemon.main, carma.daemon.api.application, carma.daemon.http.http_server, carma.daemon.housekeeping
import carma.daemon.recovery_on_start, carma.daemon.server, carma.estimate.combination
import carma.launch.process, carma.store.sqlite
import carma.vgpu.virtual_server, carma.vgpu.sampler, carma.plugins
print("loaded", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        try:
            os._exit(carma.daemon.main.run({}))
        except BaseException as error:
            print(f"the daemon could not start: {error!r}", file=sys.stderr, flush=True)
            os._exit(99)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class LivingAttempt(NamedTuple):
    """The processes of one attempt. `command` begins with the oldest, which is the command itself."""

    task: int
    attempt: int
    runner: Process | None
    command: tuple[Process, ...]

    @property
    def age_ticks(self) -> int:
        """The larger, the younger."""
        oldest = self.runner or self.command[0]
        return oldest.start_ticks


class CrashServer:
    """A server that is killed and started again: at most one daemon at a time, always in the same home."""

    def __init__(self, home: Path, gpus: int = GPUS) -> None:
        self.home = home
        self.work = home / "work"
        self.work.mkdir()
        settings = {"CARMA_VIRTUAL__GPUS": str(gpus), "CARMA_STOPPING__GRACE_S": "0.2"}
        self.environment = {**private_environment(home), **settings}
        self.paths = find_paths(self.environment)
        self.pid: int | None = None  # None: no daemon runs
        self.unexpected_ends: list[str] = []
        self._exit_code: Callable[[], int] = lambda: 0
        self._log = (home / "daemon.out").open("ab")
        self._fork_server = self._spawn([sys.executable, "-c", FORK_SERVER], subprocess.PIPE)
        self._read_line()

    def _spawn(self, command: list[str], streams: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self.environment,
            stdin=streams,
            stdout=streams,
            stderr=self._log,
            start_new_session=True,
        )

    def _read_line(self) -> str:
        assert self._fork_server.stdout is not None
        line = self._fork_server.stdout.readline().decode().strip()
        if not line:
            raise CarmaError(f"the process that starts daemons has ended: {self.log_tail()}")
        return line

    def log_tail(self) -> str:
        return (self.home / "daemon.out").read_text(errors="replace")[-2000:]

    # The daemon.

    def start(self, *, cold: bool = False) -> None:
        """Returns at once; `wait_until_serving` waits for its first answer."""
        assert self.pid is None
        if cold:
            process = self._spawn([sys.executable, "-m", "carma", "up"], subprocess.DEVNULL)
            self.pid, self._exit_code = process.pid, process.wait
            return
        assert self._fork_server.stdin is not None
        self._fork_server.stdin.write(b"\n")
        self._fork_server.stdin.flush()
        self.pid, self._exit_code = int(self._read_line()), lambda: int(self._read_line())

    def wait_until_serving(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not self._serves():
            if self.pid is not None and not self._lives(self.pid):
                self._ended(signal.SIGKILL)  # counted as an end that was not asked for
                raise CarmaError(f"the daemon ended by itself: {self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise CarmaError(f"the daemon did not answer within {LIMIT_S:g} s: {self.log_tail()}")
            time.sleep(PAUSE_S)

    def _serves(self) -> bool:
        try:
            with Client(self.paths.socket) as client:
                return client.server().pid == self.pid
        except CarmaError:
            return False

    def _lives(self, pid: int) -> bool:
        found = procfs.process(pid)
        return found is not None and not found.ended

    def signal(self, number: int) -> None:
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it ended by itself; `_ended` reports that with its log
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._ended(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: the daemon ends, its tasks go on."""
        self.signal(signal.SIGTERM)
        self._ended(None)

    def _ended(self, by: int | None) -> None:
        code = self._exit_code()
        self.pid = None
        if code != (0 if by is None else -by):
            self.unexpected_ends.append(f"the daemon ended by itself with code {code}: {self.log_tail()[-300:]}")

    # Its attempts.

    def attempts(self) -> list[LivingAttempt]:
        """All that have a living process, in the order of their ids."""
        runners: dict[tuple[int, int], list[Process]] = {}
        commands: dict[tuple[int, int], list[Process]] = {}
        ours = {os.getpid(), self.pid, self._fork_server.pid}
        for process in procfs.processes().values():
            if process.pid in ours or process.ended:
                continue
            runner_of, command_of = self._keys(process.pid)
            if command_of is not None:
                commands.setdefault(command_of, []).append(process)
            elif runner_of is not None:
                runners.setdefault(runner_of, []).append(process)
        return [_living(key, runners.get(key, []), commands.get(key, [])) for key in sorted({*runners, *commands})]

    def _keys(self, pid: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Task and attempt whose runner the process is, and whose command it belongs to."""
        environment = procfs.read_bytes(f"/proc/{pid}/environ", 2**20).split(b"\0")
        if f"{MARK}={self.home}".encode() in environment:
            values = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
            return None, (int(values[b"CARMA_TASK_ID"]), int(values[b"CARMA_ATTEMPT"]))
        words = procfs.read_bytes(f"/proc/{pid}/cmdline").decode(errors="replace")
        found = re.search(rf"{re.escape(str(self.paths.log_dir))}/(\d+)\.(\d+)\b", words)
        return (int(found[1]), int(found[2])) if found else None, None

    def strays(self) -> list[Process]:
        """Processes of tasks, also those without environment: they keep the task's working directory."""
        found = []
        for process in procfs.processes().values():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/cwd") == str(self.work) and not process.ended:
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends the daemon and everything that it has started."""
        if self.pid is not None:
            self.kill()
        self._fork_server.kill()
        self._fork_server.communicate()
        for process in self.strays():
            procfs.send(process.pid, process.start_ticks, signal.SIGKILL)
        for living in self.attempts():
            for process in (*living.command, *filter(None, (living.runner,))):
                procfs.send(process.pid, process.start_ticks, signal.SIGKILL)
        self._log.close()


def _living(key: tuple[int, int], runners: list[Process], command: list[Process]) -> LivingAttempt:
    """A child that is about to become the command still looks like its runner."""
    pids = {process.pid for process in runners}
    children = [process for process in runners if process.parent in pids]
    runner = next((process for process in runners if process.parent not in pids), None)
    ordered = sorted([*children, *command], key=lambda process: (process.start_ticks, process.pid))
    return LivingAttempt(*key, runner, tuple(ordered))


@contextlib.contextmanager
def crash_server(gpus: int = GPUS) -> Iterator[CrashServer]:
    # Under /tmp, whatever TMPDIR says: the path of a Unix socket has at most 107 bytes.
    folder = tempfile.TemporaryDirectory(prefix="carma-", dir="/tmp", ignore_cleanup_errors=True)
    with folder as home, contextlib.closing(CrashServer(Path(home), gpus)) as server:
        yield server
