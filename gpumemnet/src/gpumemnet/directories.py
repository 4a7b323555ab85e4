"""The directory that results go to: made, and known to be writable, before hours are spent on what goes there.

Files are written whole or not at all: a full disk or a kill leaves what was there before.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from carma.errors import Refused, Usage

HINT = "--out names a directory that you may write to."
PROBE = bytes(1 << 16)  # a directory on a full disk takes an empty file
PART = ".part"


def make_folder(out: Path, hint: str = HINT) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(f"{out} cannot be made: {error.strerror}", hint) from error
    check_folder(out, hint)


def check_folder(out: Path, hint: str = HINT) -> None:
    """Writes there, or where it would be made, and takes it back. What the rights say is not asked: root has all."""
    place = out.absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise Usage(f"{out} cannot be written to: {error.strerror}", hint) from error


def write_whole(path: Path, data: bytes) -> None:
    """On the disk when this returns. The old file stays until then. Of several at once the last is there, whole."""
    _tidy(path)
    try:
        file, beside = _beside(path)
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(beside, path)  # while it is locked: nobody takes it for one that was left
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def _beside(path: Path) -> tuple[BinaryIO, Path]:
    """A new file with a name of its own, locked as long as it is open."""
    while True:
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
        file = beside.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if beside.exists():
            return file, beside
        file.close()  # it was taken away before it was locked


def _tidy(path: Path) -> None:
    """What writers of this file left beside it when they were killed: nobody has it locked."""
    start = f"{path.name}."
    with suppress(OSError):  # not worth a failure
        for name in os.listdir(path.parent):
            token = name.removeprefix(start).removesuffix(PART)
            if name == f"{start}{token}{PART}" and len(token) == 8 and set(token) <= set("0123456789abcdef"):
                _take_away(path.with_name(name))


def _take_away(left: Path) -> None:
    with suppress(OSError), left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left.unlink()


def sync_folder(folder: Path) -> None:
    """Names are on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> Refused:
    return Refused(f"{path} cannot be written: {error.strerror}", "What was there before is as it was.")
