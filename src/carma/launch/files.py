"""An attempt's directory as the launcher reads it: the runner's records, typed, and the logs.

Unknown fields are ignored, because a runner of another version may outlive an upgrade of the daemon.
"""

from __future__ import annotations

import os
import shutil
from typing import TypeVar

import msgspec

from carma.core.model import AttemptKey, Confinement
from carma.launch import logs, records
from carma.launch.outcome import TAIL_BYTES, ExitRecord, LastWords, Told


class Claim(msgspec.Struct, frozen=True):
    """A process's identity: a pid alone comes back for another one."""

    pid: int
    start_ticks: int
    boot_id: str


class Started(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    runner: Claim
    started_at: float
    token: str
    logs: tuple[logs.LogFile, logs.LogFile]


class Held(msgspec.Struct, frozen=True):
    """How it shares its GPUs; `server` is the name of the MPS server that it runs under."""

    confinement: Confinement
    server: str | None = None


class Trouble(msgspec.Struct, frozen=True):
    reason: str


T = TypeVar("T", Claim, Started, ExitRecord, Told, Held, Trouble)


class AttemptFiles:
    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.path.abspath(directory)

    def path(self, key: AttemptKey, name: str = "") -> str:
        """Without a name: the attempt's own directory, with a slash at its end."""
        return os.path.join(self.directory, str(key), name)

    def exists(self, key: AttemptKey, name: str = "") -> bool:
        return os.path.lexists(self.path(key, name))

    def claim(self, key: AttemptKey) -> Claim | None:
        return self._read(key, records.CLAIM, Claim)

    def started(self, key: AttemptKey) -> Started | None:
        return self._read(key, records.STARTED, Started)

    def ending(self, key: AttemptKey) -> ExitRecord | None:
        return self._read(key, records.EXIT, ExitRecord)

    def told(self, key: AttemptKey) -> Told | None:
        return self._read(key, records.TOLD, Told)

    def held(self, key: AttemptKey) -> Held | None:
        return self._read(key, records.HELD, Held)

    def trouble(self, key: AttemptKey) -> Trouble | None:
        return self._read(key, records.TROUBLE, Trouble)

    def _read(self, key: AttemptKey, name: str, kind: type[T]) -> T | None:
        try:
            with open(self.path(key, name), "rb") as file:
                return msgspec.json.decode(file.read(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None

    def own_logs(self, key: AttemptKey) -> tuple[str, str]:
        return self.path(key, records.STDOUT), self.path(key, records.STDERR)

    def log_paths(self, key: AttemptKey) -> tuple[str, str]:
        """Where standard output and standard error go; the same twice when they go together."""
        order = records.read(self.path(key, records.ORDER))
        return (order["stdout"], order["stderr"]) if order is not None else self.own_logs(key)

    def last_words(self, key: AttemptKey, started: Started | None) -> LastWords:
        """The ends of both logs; nothing when the command never ran, for then they are not its words."""
        if started is None:
            return LastWords("", "")
        stdout, stderr = self.log_paths(key)
        first, second = started.logs
        return LastWords(logs.read_tail(stderr, second, TAIL_BYTES), logs.read_tail(stdout, first, TAIL_BYTES))

    def remove(self, key: AttemptKey) -> None:
        shutil.rmtree(self.path(key), ignore_errors=True)
