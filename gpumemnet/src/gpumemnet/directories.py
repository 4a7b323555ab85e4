"""The directory of the results: created, and known to be writable, before hours are spent on them.

Files are written completely or not at all: after a full disk or a kill the old file is still there.
"""

from __future__ import annotations

import fcntl
import os
import re
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
    """Checks a folder, which need not exist yet."""
    try:
        probe(out)
    except OSError as error:
        raise Usage(f"{out} cannot be written to: {error.strerror}", hint) from error


def probe(out: Path) -> None:
    """Writes a file there, or in the nearest parent that exists, and removes it. Raises OSError. The access rights are
    not read: root has all of them."""
    place = out.absolute()
    while not os.path.lexists(place):
        place = place.parent
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(PROBE)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Writes the file atomically. On return it is on the disk; until then the old one stays. The last of several
    writers wins."""
    try:
        replace_whole(path, data)
    except OSError as error:
        raise cannot_write(path, error) from error


def replace_whole(path: Path, data: bytes) -> None:
    """The same; raises OSError."""
    _remove_left(path)
    file, beside = _beside(path)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, path)  # while it is locked, so that no other writer removes it as left behind
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _beside(path: Path) -> tuple[BinaryIO, Path]:
    """A new file with a unique name, locked as long as it is open."""
    while True:
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
        file = beside.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if beside.exists():
            return file, beside
        file.close()  # another writer removed it before it was locked


def _remove_left(path: Path) -> None:
    """Removes temporary files next to this file that killed writers have left: those that no process has locked."""
    left = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}" + re.escape(PART))
    with suppress(OSError):  # not worth a failure
        for name in filter(left.fullmatch, os.listdir(path.parent)):
            with suppress(OSError), path.with_name(name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_name(name).unlink()


def sync_folder(folder: Path) -> None:
    """Writes the names of its files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path | str, error: OSError) -> Refused:
    return Refused(f"{path} cannot be written: {error.strerror}", "The old file, if any, is unchanged.")
