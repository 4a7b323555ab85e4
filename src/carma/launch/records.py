"""The files of an attempt's directory, through which the runner and the launcher speak.

    order.json    what to start (launcher)          stop          do not start any more (launcher)
    claim.json    who carries it out (runner)       started.json  which process it became (runner)
    exit.json     how it ended (runner)             told.json     which signals it was sent to end it (launcher)
    held.json     how it shares its GPUs (launcher) trouble.json  what it runs under is gone (launcher)
    asked.json    that it was told to save and leave (launcher)
    stdout.log, stderr.log, runner.log

Each is written beside its name and renamed, so that a reader meets all of it or nothing. Standard library only, and
light: the runner imports this. It must not know what the records mean.
"""

from __future__ import annotations

import errno
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ORDER, CLAIM, STARTED, EXIT = "order.json", "claim.json", "started.json", "exit.json"
STOP, TOLD = "stop", "told.json"
HELD, TROUBLE, ASKED = "held.json", "trouble.json", "asked.json"
STDOUT, STDERR, RUNNER_LOG = "stdout.log", "stderr.log", "runner.log"

RESERVED_BYTES = 4096  # more than an exit record ever takes; see `reserve`
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 10.0
PASSING = frozenset(  # errors that go away by themselves: no space, no memory, too many files
    (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO)
)


def read(path: str) -> dict[str, Any] | None:
    """The record, or None when there is none (or none that can be read)."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def encode(value: dict[str, Any]) -> bytes:
    """ASCII, with anything else escaped: also the bytes in arguments and paths that are no valid UTF-8."""
    return json.dumps(value).encode("ascii")


def write(path: str, value: dict[str, Any], *, durable: bool = True) -> None:
    temporary = path + ".tmp"
    data = encode(value)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, data)  # over what `reserve` put there, which needs no new space
        os.ftruncate(fd, len(data))
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    if durable:
        sync_directory(os.path.dirname(path))


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def reserve(path: str) -> None:
    """Take the space of a record before it is needed: a disk that fills up meanwhile does not lose how a task ended."""
    fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, b" " * RESERVED_BYTES)
    finally:
        os.close(fd)


def write_patiently(path: str, value: dict[str, Any], limit_s: float) -> bool:
    """Try again while the disk is full, up to `limit_s`; False when it could not be written."""
    pause_s = FIRST_PAUSE_S
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            write(path, value)
            return True
        except OSError as error:
            if error.errno not in PASSING or time.monotonic() + pause_s > deadline_s:
                return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def create_once(path: str, value: dict[str, Any]) -> bool:
    """Write a record that did not exist, complete from the first moment; False when it does exist."""
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
