"""An attempt's directory as the launcher reads it: the runner's records, typed, and CARMA's own log files.

The daemon never opens a file that a user named: it may be root, and the path may lead anywhere by the time it is
opened. Such a file is read by its owner (the command line does that), or by the runner through a descriptor that was
opened with the owner's rights before the command started. CARMA's own log files lie in the attempt's directory, which
only the daemon's user can change, and are found by the attempt's key alone.

Unknown fields of records are ignored, because a runner of another version may outlive an upgrade of the daemon. A
record that cannot be read at the moment (too many open files) raises OSError: it must not count as missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from carma import procfs
from carma.core.model.values import AttemptKey, Confinement, TaskId
from carma.launch import attempt_records as records
from carma.launch import output_files
from carma.launch.exit_outcome import ExitRecord, LastWords, StopRecord

_DIRECTORY = re.compile(r"([0-9]+)\.([0-9]+)")
Stream = Literal["stdout", "stderr"]


class Claim(msgspec.Struct, frozen=True):
    """A process by pid, start time and boot: pids are reused."""

    pid: int
    start_ticks: int
    boot_id: str


class Started(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    runner: Claim
    started_at: float
    token: str


class SharingRecord(msgspec.Struct, frozen=True):
    """held.json. `server`: the name of the MPS server under which it runs; `trouble`: why it has lost that server."""

    confinement: Confinement
    server: str | None = None
    trouble: str | None = None


T = TypeVar("T", Claim, Started, ExitRecord, StopRecord, SharingRecord)


class AttemptFiles:
    def __init__(self, directory: str | os.PathLike[str], *, max_output_bytes: int = 0) -> None:
        """`max_output_bytes`: of each log file of an attempt that has ended; 0 for no limit."""
        self.directory = os.path.abspath(directory)
        self.max_output_bytes = max_output_bytes

    @cached_property
    def boot_id(self) -> str:
        return procfs.boot_id()

    def path(self, key: AttemptKey, name: str = "") -> str:
        """Path of a file; without a name the attempt's own directory, with a slash at its end."""
        return os.path.join(self.directory, str(key), name)

    def attempts(self) -> Iterator[AttemptKey]:
        """All attempts that have a directory."""
        return (key for name in os.listdir(self.directory) if (key := key_of(name)) is not None)

    def exists(self, key: AttemptKey, name: str = "") -> bool:
        return os.path.lexists(self.path(key, name))

    def alive(self, who: Claim) -> bool:
        return who.boot_id == self.boot_id and procfs.alive(who.pid, who.start_ticks)

    def claim(self, key: AttemptKey) -> Claim | None:
        return self._read(key, records.CLAIM, Claim)

    def started(self, key: AttemptKey) -> Started | None:
        return self._read(key, records.STARTED, Started)

    def ending(self, key: AttemptKey) -> ExitRecord | None:
        return self._read(key, records.EXIT, ExitRecord)

    def stop(self, key: AttemptKey) -> StopRecord | None:
        return self._read(key, records.STOP_SIGNALS, StopRecord)

    def sharing(self, key: AttemptKey) -> SharingRecord | None:
        return self._read(key, records.SHARING, SharingRecord)

    def _read(self, key: AttemptKey, name: str, kind: type[T]) -> T | None:
        data = records.read_bytes(self.path(key, name))
        try:
            return msgspec.json.decode(data, type=kind) if data is not None else None
        except msgspec.DecodeError:
            return None

    def log_path(self, key: AttemptKey, which: Stream) -> str:
        return self.path(key, records.LOGS[which])

    def open_log(self, key: AttemptKey, which: Stream) -> int | None:
        """A descriptor for reading CARMA's own log file of this attempt; None if it does not exist (yet). Raises
        BlockingIOError while the submitter holds a lease on it (`fcntl` F_SETLEASE): only the owner of a file can take
        one, and not while the runner has it open."""
        return _open_own(self.log_path(key, which))

    def last_words(self, key: AttemptKey, ending: ExitRecord) -> LastWords:
        """The ends of both outputs: as the runner recorded them, otherwise from CARMA's own log files."""
        stderr, stdout = ending.stderr_tail, ending.stdout_tail
        return LastWords(
            stderr if stderr is not None else self.read_tail(key, records.LOGS["stderr"], output_files.TAIL_BYTES),
            stdout if stdout is not None else self.read_tail(key, records.LOGS["stdout"], output_files.TAIL_BYTES),
        )

    def read_tail(self, key: AttemptKey, name: str, limit: int) -> str:
        """The last `limit` bytes of one of CARMA's own log files; "" while the submitter holds a lease on it."""
        try:
            fd = _open_own(self.path(key, name))
        except BlockingIOError:
            return ""
        if fd is None:
            return ""
        try:
            size = os.fstat(fd).st_size
            return os.pread(fd, limit, max(0, size - limit)).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def read_head(self, key: AttemptKey, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file that only its attempt's user writes; empty if there is none."""
        fd = _open_own(self.path(key, name))
        if fd is None:
            return b""
        try:
            return os.pread(fd, limit, 0)
        finally:
            os.close(fd)

    def drop_records(self, key: AttemptKey) -> None:
        """Called once the outcome is in the database: only exit.json, without the tails, and logs that are not empty
        stay, closed to the submitter. Because of exit.json the attempt is never started again, not even by a daemon on
        an older copy of the database. Nothing is done to an attempt that another database may know as running."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key, "order.json"))  # of an older version; it contains the submitter's environment
        ending, claim = self.ending(key), self.claim(key)
        if ending is None and claim is not None and self.alive(claim):
            return
        for name in records.LOGS.values():
            output_files.seal(self.path(key, name), self.max_output_bytes)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(self.path(key), 0o700)  # with names in it out of reach, no hard link to them can be made
        if ending is not None:
            self._drop_all_but_the_end(key, ending)

    def _drop_all_but_the_end(self, key: AttemptKey, ending: ExitRecord) -> None:
        if ending.stdout_tail is not None or ending.stderr_tail is not None:
            short = msgspec.structs.replace(ending, stdout_tail=None, stderr_tail=None)
            records.write(self.path(key, records.EXIT), msgspec.to_builtins(short), durable=False)
        with os.scandir(self.path(key)) as entries:
            for entry in entries:
                if entry.name not in records.ENDED or entry.stat(follow_symlinks=False).st_size == 0:
                    os.unlink(entry.path)


def key_of(name: str) -> AttemptKey | None:
    """The attempt whose directory has that name."""
    match = _DIRECTORY.fullmatch(name)
    return None if match is None else AttemptKey(TaskId(int(match[1])), int(match[2]))


def _open_own(path: str) -> int | None:
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        return None
    return found
