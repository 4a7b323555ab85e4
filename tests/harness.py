"""A real daemon in a home of its own, on virtual GPUs, for tests: started, killed, started again, always cleaned up.

with serving(gpus=2) as daemon:
    task = daemon.submit("true")
    assert daemon.wait(task).outcome == {"kind": "succeeded"}
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from carma import cgroups
from carma.client import Client
from carma.core.model.values import TaskSpec
from carma.errors import Unreachable
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.paths import Paths, find_paths
from carma.wire.api_types import SubmitRequest, TaskView
from tests.fork_server import Forked, ForkServer

LIMIT_S = 180.0
REPOSITORY = Path(__file__).parents[1]
SOMEBODY = 65534  # a uid that is neither root nor ours
_START = "import sys; from carma.cli import main; sys.exit(main(['up', *sys.argv[1:]]))"


class HarnessError(AssertionError):
    pass


def until(holds: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Poll; the limit is generous because it is only met when something is broken."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise HarnessError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.01)


class Daemon:
    """`settings` are dotted names with their values, as `carma up --set` takes them."""

    def __init__(self, home: Path, *, gpus: int = 2, memory_mib: int = 8192, **settings: object) -> None:
        self.home = home
        given = {"virtual__gpus": gpus, "virtual__gpu_memory_mib": memory_mib, **settings}
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CARMA_")},
            "CARMA_HOME": str(home),
            **{f"CARMA_{name.upper()}": str(value) for name, value in given.items()},
        }
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.log_file = home / "test-daemon.log"
        self.prelude = ""  # Python code that the daemon's process runs first
        self.popen_options: dict[str, Any] = {}  # umask, extra_groups, pass_fds: how its process is started
        self.own_program = False  # start it as a program, not by fork: slower, but as users start it
        self._client: Client | None = None

    @property
    def paths(self) -> Paths:
        return find_paths({"CARMA_HOME": str(self.home)})

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    # The daemon's life.

    def spawn(self, *flags: str) -> subprocess.Popen[bytes] | Forked:
        """Start it without waiting for it."""
        own_modules = self.environ.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
        if not (self.own_program or self.prelude or self.popen_options or own_modules):
            self.process = fork_server().start(flags, self.environ, self.log_file)
            return self.process
        with self.log_file.open("ab") as log:
            command = [sys.executable, "-c", f"{self.prelude}\n{_START}", *flags]
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            environ = {**self.environ, "PYTHONPATH": python_path(REPOSITORY)} if self.prelude else self.environ
            self.process = subprocess.Popen(command, env=environ, **files, **self.popen_options)
        return self.process

    def start(self, *flags: str) -> Daemon:
        self.spawn(*flags)
        until(self.answers, "the daemon answers")
        return self

    def answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise HarnessError(f"the daemon ended with {self.process.returncode}:\n{self.log}")
        try:
            return self.client.server().pid == self.process.pid
        except Unreachable:
            return False

    def kill(self) -> None:
        """Kills the daemon as a power cut would. The processes that it started go on."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self.process is not None
        self.drop_client()
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    # Asking it.

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.paths.socket)
        return self._client

    def drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def submit(self, *command: str, **spec: Any) -> int:
        """One task; its id."""
        return self.client.submit(request(*command, directory=str(self.home), **spec)).ids[0]

    def wait(self, task: int) -> TaskView:
        view = self.client.wait(task, LIMIT_S)
        if view.state != "finished":
            raise HarnessError(f"task {task} has not finished but is {view.state}: {view.reason}\n{self.log}")
        return view

    def until_state(self, task: int, state: str) -> TaskView:
        until(lambda: self.client.task(task).state in (state, "finished"), f"task {task} is {state}")
        view = self.client.task(task)
        assert view.state == state, f"task {task} is {view.state}: {view.reason}"
        return view

    # Cleaning up.

    def clean(self) -> None:
        self.drop_client()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        until(self._kill_what_is_left, "all processes of the test are gone")
        found = cgroups.find(enable=False)
        if not isinstance(found, str):
            groups = AttemptCgroups(found, self.paths.log_dir)
            for key in groups.existing():
                groups.remove(key)

    def _kill_what_is_left(self) -> bool:
        left = processes_of(self.home)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left


@functools.cache
def _fork_server(_pid: int) -> ForkServer:
    return ForkServer()


def fork_server() -> ForkServer:
    """One for each test process."""
    return _fork_server(os.getpid())


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with these folders before those of the test run itself."""
    return os.pathsep.join((*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])))


def request(*command: str, directory: str, **spec: Any) -> SubmitRequest:
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
    return SubmitRequest(spec=TaskSpec(command=command, directory=directory, environment=environment, **spec))


def virtual(memory_mib: int, seconds: float, *more: str, sm: float = 0.2) -> tuple[str, ...]:
    """The command of a virtual task."""
    arguments = ("--memory-mib", str(memory_mib), "--sm", str(sm), "--dram", "0.1", "--seconds", str(seconds))
    return (sys.executable, "-m", "carma.vgpu.virtual_task", *arguments, *more)


def processes_of(home: Path) -> list[int]:
    """Living processes whose command line or environment names this home: daemon, runners, tasks."""
    mark = str(home).encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                about = Path("/proc", entry, "cmdline").read_bytes() + Path("/proc", entry, "environ").read_bytes()
                if mark in about:
                    found.append(int(entry))
    return found


@contextlib.contextmanager
def new_home() -> Iterator[Path]:
    """A directory with a short path, for the socket's sake."""
    home = Path(tempfile.mkdtemp(prefix="carma-", dir="/tmp"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def daemon_at_rest(**settings: Any) -> Iterator[Daemon]:
    """A daemon that is not started yet."""
    with new_home() as home:
        daemon = Daemon(home, **settings)
        try:
            yield daemon
        finally:
            daemon.clean()


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[Daemon]:
    with daemon_at_rest(**settings) as daemon:
        yield daemon.start()


@contextlib.contextmanager
def somebody_else(daemon: Daemon) -> Iterator[Client]:
    """A client whose connection the kernel gives to another user."""
    with Client(daemon.paths.socket) as client:
        os.setegid(SOMEBODY)
        os.seteuid(SOMEBODY)
        try:
            client.server()  # connects now
        finally:
            os.seteuid(0)
            os.setegid(0)
        yield client
