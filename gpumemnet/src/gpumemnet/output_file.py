"""A file for results: checked before the work is done, and written completely or not at all.

`-` is standard output. A link is followed. A device or a pipe is written to and never replaced.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from carma.errors import Usage
from gpumemnet.directories import cannot_write, probe, replace_whole

STDOUT = "-"
MARK = "made by CARMA"  # in the head of pages and pictures, which may be overwritten
_HEAD = 4096  # bytes


def check_file(typed: str, flag: str = "--out") -> None:
    """Refuses a file that cannot be written, as far as that is known before. Errors name the file as it was typed."""
    hint = f"{flag} names a file in a directory that you may write to."
    if not typed:
        raise Usage(f"{flag} has an empty name", hint)
    if typed == STDOUT:
        return
    path = Path(os.path.realpath(typed))
    try:
        mode = _mode(path)
        if mode is None and typed.endswith("/"):
            raise Usage(f"{typed} names a directory, not a file", hint)
        if mode is not None and stat.S_ISDIR(mode):
            raise Usage(f"{typed} is a directory", hint)
        if mode is not None and not os.access(path, os.W_OK):
            raise Usage(f"{typed} cannot be written: Permission denied", hint)
        if mode is None or stat.S_ISREG(mode):
            if not path.parent.is_dir():
                raise Usage(f"{typed} cannot be written: there is no directory {Path(typed).parent}", hint)
            probe(path.parent)
    except OSError as error:
        raise Usage(f"{typed} cannot be written: {error.strerror}", hint) from error


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def holds_something(typed: str) -> bool:
    """Whether it is a regular file with content, which would be lost."""
    path = Path(typed)
    return typed != STDOUT and path.is_file() and path.stat().st_size > 0


def made_here(typed: str) -> bool:
    """Whether the file has our mark: a page or a picture of an earlier call."""
    with Path(typed).open("rb") as file:
        return MARK.encode() in file.read(_HEAD)


def write_file(typed: str, data: bytes) -> None:
    if typed == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(os.path.realpath(typed))
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            with path.open("wb", buffering=0) as file:
                _write_all(file.fileno(), data)
            return
        replace_whole(path, data)
    except OSError as error:
        raise cannot_write(typed, error) from error
    if mode is not None:
        path.chmod(stat.S_IMODE(mode))


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
