"""A daemon in a temporary directory, for tests, demos and benchmarks.

It uses no settings file, socket or daemon of the user. The daemon, its tasks and the directory are removed at the end,
also after an error, Ctrl-C or a crash of the daemon.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Self

import msgspec

from carma.client import Client
from carma.core.model.values import Record
from carma.errors import CarmaError, Unreachable
from carma.paths import find_paths

START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PrivateSettings(Record, frozen=True, kw_only=True):
    """`settings` is written to the settings file of the daemon. `pairs` are settings as `carma up --set` takes them."""

    policy: str = "magm"
    gpus: int = 4  # virtual GPUs; 0: those of the machine
    gpu_memory_mib: int = 40_960
    speed: float = 1.0
    settings: dict[str, dict[str, object]] = {}
    pairs: dict[str, str] = {}


class PrivateDaemon:
    """A context manager with a `client`, a directory `work` for tasks, and the `environment` of its commands."""

    def __init__(self, settings: PrivateSettings, *, keep: bool = False) -> None:
        self._settings = settings
        self._keep = keep
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # A short path under /tmp, because the path of a Unix socket has at most 107 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="carma-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self.work = self.home / "work"
        self.environment = private_environment(self.home)
        self.socket = find_paths(self.environment).socket
        self.client = Client(self.socket)  # to be used by one thread at a time
        try:
            self.work.mkdir()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the daemon; after `kill`, again in the same home with its database."""
        find_paths(self.environment).config_file.write_text(toml(self._settings.settings))
        with (self.home / "daemon.out").open("ab") as output:
            self._process = subprocess.Popen(
                self._command(),
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the daemon
            )
        wait_until(self._answers, START_LIMIT_S, "the private daemon did not answer within a minute")

    def restart(self, settings: PrivateSettings) -> None:
        """End the daemon, cancel its tasks, and start another one in the same home, with its history."""
        self.stop()
        self._settings = settings
        self.start()

    def kill(self) -> None:
        """SIGKILL to the daemon only; its tasks go on."""
        assert self._process is not None
        self.client.close()
        self._process.kill()
        self._process.wait()

    def _command(self) -> list[str]:
        wanted = self._settings
        virtual = (
            *("--virtual-gpus", str(wanted.gpus)),
            *("--gpu-memory", f"{wanted.gpu_memory_mib}MiB"),
            *("--speed", f"{wanted.speed:g}"),
        )
        return [
            *(sys.executable, "-m", "carma", "up"),
            *(virtual if wanted.gpus else ()),
            *("--policy", wanted.policy),
            *(f"--set={name}={value}" for name, value in wanted.pairs.items()),
        ]

    def _answers(self) -> bool:
        self.check_alive()
        try:
            self.client.server()
        except Unreachable:
            return False
        return True

    def check_alive(self) -> None:
        """Raise with the end of its output if the daemon is gone."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            output = (self.home / "daemon.out").read_text(errors="replace").strip()[-2000:]
            raise CarmaError(f"the private daemon ended with code {code}: {output or 'no output'}")

    def close(self) -> None:
        """End the daemon and its tasks and remove the directory. Idempotent; Ctrl-C cannot interrupt it."""
        with handling_ends(signal.SIG_IGN):
            self.stop()
            kill_strays(self.home)
            if not self._keep:
                shutil.rmtree(self.home, ignore_errors=True)

    def stop(self) -> None:
        """End the daemon and cancel its tasks. The home stays."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(CarmaError, OSError), Client(self.socket, timeout_s=STOP_LIMIT_S) as client:
                client.shutdown(cancel_running=True)
            end(self._process)
        self.client.close()


@contextlib.contextmanager
def handling_ends(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP have this handler within the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def ending_in_order() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, so that private daemons are ended."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return handling_ends(interrupt)


def toml(tables: dict[str, dict[str, object]]) -> str:
    """Tables of plain values as TOML, whose spelling of such values is that of JSON."""
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def private_environment(home: Path) -> dict[str, str]:
    """The environment without CARMA variables, and with the private home."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("CARMA_")}
    return {**own, "CARMA_HOME": str(home)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a requested end; then SIGTERM, then SIGKILL."""
    for insist in (None, signal.SIGTERM, signal.SIGKILL):
        if insist is not None:
            process.send_signal(insist)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
            return


def kill_strays(home: Path) -> None:
    """SIGKILL to processes with this private home in their environment, MPS daemons included."""
    marks = tuple(f"{name}={home}".encode() for name in ("CARMA_HOME", "CUDA_MPS_PIPE_DIRECTORY"))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if any(pair.startswith(marks) for pair in (entry / "environ").read_bytes().split(b"\0")):
                os.kill(int(entry.name), signal.SIGKILL)


def wait_until(condition: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    """Poll the condition; CarmaError with the message `otherwise` after the time limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise CarmaError(otherwise)
        time.sleep(0.02)
