"""The directory that results go to: made, and known to be writable, before hours are spent on what goes there.

Files are written whole or not at all: a full disk or a kill leaves what was there before.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from carma.errors import Refused, Usage

HINT = "--out names a directory that you may write to."
PROBE = bytes(1 << 16)  # a directory on a full disk takes an empty file
PART = ".part"
LEFT_S = 3600.0  # since somebody last wrote to what stands beside: it was killed


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
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    _tidy(path)
    try:
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def _tidy(path: Path) -> None:
    """What writers of this file left beside it when they were killed. Whose they are is asked of the clock: a process's
    number says nothing on a file system of several machines."""
    before, start = time.time() - LEFT_S, f"{path.name}."
    with suppress(OSError):  # not worth a failure
        for entry in os.scandir(path.parent):
            token = entry.name.removeprefix(start).removesuffix(PART)
            if entry.name == f"{start}{token}{PART}" and _is_token(token) and entry.stat().st_mtime < before:
                os.unlink(entry.path)


def _is_token(text: str) -> bool:
    return len(text) == 8 and set(text) <= set("0123456789abcdef")


def sync_folder(folder: Path) -> None:
    """Names are on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> Refused:
    return Refused(f"{path} cannot be written: {error.strerror}", "What was there before is as it was.")
