"""The files of an attempt's directory: the records that the runner and the launcher exchange.

    claim.json    which runner has the attempt (runner)      stop          do not start the command (launcher)
    started.json  which process was started (runner)         told.json     signals sent to end it (launcher)
    exit.json     how it ended (runner)                      held.json     how it shares its GPUs (launcher)
    asked.json    the last request to save (launcher)        stdout.log, stderr.log, runner.log
    paused.json   its processes are to stand still (launcher)
    steps.bin     optimizer steps of its processes (the task itself; its user owns the file, see step_file.py)

The order itself, which contains the submitter's environment, is never a file: the runner gets it through a descriptor.
Each record is written under a temporary name and renamed, so that a reader gets all of it or nothing. Once the outcome
is in the database, only exit.json and the logs stay (see `ENDED`). Standard library only: the runner imports this
module. It must not know what the records mean.
"""

from __future__ import annotations

import errno
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLAIM, STARTED, EXIT = "claim.json", "started.json", "exit.json"
STOP, STOP_SIGNALS, ASKED, SHARING = "stop", "told.json", "asked.json", "held.json"
PAUSED = "paused.json"
RUNNER_LOG, STEPS = "runner.log", "steps.bin"
LOGS = {"stdout": "stdout.log", "stderr": "stderr.log"}  # of each stream
ENDED = frozenset((EXIT, *LOGS.values()))  # files that stay once the outcome is in the database

RESERVED_BYTES = 4096  # more than an exit record needs; see `reserve`
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 10.0
NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))  # errors of the machine, not of one file
TRANSIENT = NO_RESOURCES | frozenset(  # errors that pass by themselves: no space, no memory, too many open files
    (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EIO)
)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def read_bytes(path: str) -> bytes | None:
    """A record as it was written; None if it does not exist. Raises OSError for anything else: a record that cannot be
    read at the moment (too many open files) does exist."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: str) -> dict[str, Any] | None:
    """The record; None if it does not exist or is not one. Raises OSError as `read_bytes` does."""
    data = read_bytes(path)
    return decode(data) if data is not None else None


def decode(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def encode(value: dict[str, Any]) -> bytes:
    """ASCII with escapes, which also holds bytes in arguments and paths that are not valid UTF-8."""
    return json.dumps(value).encode("ascii")


def write(path: str, value: dict[str, Any], *, durable: bool = True) -> None:
    temporary = path + ".tmp"
    with open(os.open(temporary, _CREATE, 0o600), "wb") as file:
        file.write(encode(value))  # over the bytes of `reserve`, which takes no new space
        file.truncate()
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(temporary, path)
    if durable:
        sync_directory(os.path.dirname(path))


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def reserve(path: str) -> None:
    """Take the space of a record in advance, so that its record can be written on a disk that is full by then."""
    with open(os.open(path + ".tmp", _CREATE, 0o600), "wb") as file:
        file.write(b" " * RESERVED_BYTES)


def write_patiently(path: str, value: dict[str, Any], limit_s: float) -> bool:
    """Retry for up to `limit_s` while the disk is full; False if the record could not be written."""
    pause_s, deadline_s = FIRST_PAUSE_S, time.monotonic() + limit_s
    while True:
        try:
            write(path, value)
            return True
        except OSError as error:
            if error.errno not in TRANSIENT or time.monotonic() + pause_s > deadline_s:
                return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def create_once(path: str, value: dict[str, Any]) -> bool:
    """Create a record, complete from its first moment; False if it exists already."""
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, _CREATE | os.O_TRUNC, 0o600)
    try:
        write_all(fd, encode(value))
        os.fsync(fd)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.close(fd)
        os.unlink(temporary)
    sync_directory(os.path.dirname(path))
    return True


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
