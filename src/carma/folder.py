"""The directory that results go to: made, and known to be writable, before hours are spent on what goes there.

Files are written whole or not at all: a full disk or a kill leaves what was there before.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from carma.errors import Refused, Usage

HINT = "--out names a directory that you may write to."
PROBE = bytes(1 << 16)  # a directory on a full disk takes an empty file


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
    """On the disk when this returns. The old file stays until then."""
    beside = path.with_name(f"{path.name}.part")
    try:
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_folder(folder: Path) -> None:
    """Names are on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> Refused:
    return Refused(f"{path} cannot be written: {error.strerror}", "What was there before is as it was.")
