"""A file that somebody names for results: looked at before the work is done, and written whole or not at all.

`-` is standard output. A link is followed. What is no regular file (a device, a pipe) is written to as it is and never
replaced.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from carma.errors import Refused, Usage
from gpumemnet.directories import cannot_write, check_folder, write_whole

STDOUT = "-"
MARK = "made by CARMA"  # in the head of pages and pictures, so that they may be made again
_HEAD = 4096  # bytes


def check_file(typed: str, flag: str = "--out") -> None:
    """That it can be written, as far as that can be known before; what is wrong is told in the words typed."""
    hint = f"{flag} names a file in a directory that you may write to."
    if not typed:
        raise Usage(f"{flag} has an empty name", hint)
    if typed == STDOUT:
        return
    path = Path(os.path.realpath(typed))
    try:
        mode = _mode(path)
    except OSError as error:
        raise Usage(f"{typed} cannot be written: {error.strerror}", hint) from error
    if mode is None and typed.endswith("/"):
        raise Usage(f"{typed} names a directory, not a file", hint)
    if mode is not None:
        _check_there(typed, path, mode, hint)
    if mode is None or stat.S_ISREG(mode):
        _check_parent(typed, path.parent, hint)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _check_there(typed: str, path: Path, mode: int, hint: str) -> None:
    if stat.S_ISDIR(mode):
        raise Usage(f"{typed} is a directory", hint)
    if not os.access(path, os.W_OK):
        raise Usage(f"{typed} cannot be written: Permission denied", hint)


def _check_parent(typed: str, parent: Path, hint: str) -> None:
    if not parent.is_dir():
        raise Usage(f"{typed} cannot be written: there is no directory {Path(typed).parent}", hint)
    try:
        check_folder(parent, hint)
    except Usage as error:
        reason = error.__cause__
        assert isinstance(reason, OSError)
        raise Usage(f"{typed} cannot be written: {reason.strerror}", hint) from reason


def holds_something(typed: str) -> bool:
    """Whether there is a regular file with anything in it, which would be gone."""
    path = Path(typed)
    return typed != STDOUT and path.is_file() and path.stat().st_size > 0


def made_here(typed: str) -> bool:
    """Whether what is there has our mark: a page or a picture of an earlier call."""
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
    except OSError as error:
        raise cannot_write(Path(typed), error) from error
    try:
        write_whole(path, data)
    except Refused as error:
        reason = error.__cause__
        assert isinstance(reason, OSError)
        raise cannot_write(Path(typed), reason) from reason
    if mode is not None:
        path.chmod(stat.S_IMODE(mode))


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
