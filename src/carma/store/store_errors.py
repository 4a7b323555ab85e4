"""Converts errors of SQLite and of the file system into a StoreError with the file and a remedy.

Files are never repaired or removed here: the owner of a damaged database decides.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from carma.errors import StoreError

FileIdentity = tuple[int, int]  # device and inode of a file

FRESH = "`carma up --new-database` starts with an empty database and keeps the old files under another name."
_KEEP = f"The file is unchanged. Restore a backup; or {FRESH}"
_ROOM = (
    "Nothing was changed. Free some space on this disk and try again; an administrator can also move CARMA_HOME to a "
    "larger disk."
)
_PERMIT = "Check the owner and the mode of the file and its directory; they must belong to the daemon's user."
_BUSY = "Another program has it open for writing; close that program and try again."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def identity(path: Path) -> FileIdentity | None:
    """The file that has this name now; None if there is none. Raises OSError if that cannot be determined."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def from_sqlite(error: sqlite3.Error, path: Path, doing: str) -> StoreError:
    """`doing` completes "could not ...": "open", "store 2 events in"."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # drops the extended part
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreError(f"could not {doing} {path}: the file is not a database", _KEEP)
    if primary == sqlite3.SQLITE_CORRUPT:
        return damaged(path, doing, str(error))
    # SQLite reports a disk without room for its log or its shared memory as a file that cannot be opened.
    cannot_write = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    if primary == sqlite3.SQLITE_FULL or (primary in cannot_write and _is_full(path)):
        return StoreError(f"could not {doing} {path}: the disk is full", _ROOM)
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH):
        return StoreError(f"could not {doing} {path}: it cannot be written ({error})", _PERMIT)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"could not {doing} {path}: it is locked ({error})", _BUSY)
    if primary == sqlite3.SQLITE_IOERR:
        return StoreError(f"could not {doing} {path}: the disk refused ({error})", _ROOM)
    return StoreError(f"could not {doing} {path}: {error}", "See the daemon's log for the details.")


def _is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 64 * 1024 or (disk.f_files > 0 and disk.f_favail == 0)


def from_os(error: OSError, path: Path, doing: str) -> StoreError:
    return StoreError(f"could not {doing} {path}: {reason_of(error)}", hint_of(error))


def reason_of(error: OSError) -> str:
    why = error.strerror or str(error)
    return why[:1].lower() + why[1:]


def hint_of(error: OSError) -> str:
    return _ROOM if error.errno in _FULL else _PERMIT


def damaged(path: Path, doing: str, finding: str) -> StoreError:
    return StoreError(f"could not {doing} {path}: the database is damaged ({finding})", _KEEP)


def empty(path: Path) -> StoreError:
    return StoreError(f"could not open {path}: the file is empty; its content was lost", _KEEP)


def missing(path: Path, trace: Path) -> StoreError:
    return StoreError(
        f"could not open {path}: the file is missing, but {trace} shows that there was a database",
        f"Restore the database; or {FRESH}",
    )


def outdated(path: Path, found: int, expected: int, record: Path) -> StoreError:
    return StoreError(
        f"could not open {path}: it ends at event {found:,}, but event {expected:,} was acknowledged; its write-ahead "
        f"log ({path.name}-wal) was removed or damaged, or an older copy was written over it",
        f"Put the missing file back. To go on without those events, remove {record} and start again; {FRESH}",
    )


def removed(path: Path, doing: str) -> StoreError:
    return StoreError(
        f"could not {doing} {path}: the database or its write-ahead log was removed or replaced while the daemon ran",
        f"The daemon stops; running tasks go on. Put the files back and run `carma up`; or {FRESH}",
    )


def too_new(path: Path, found: int, known: int) -> StoreError:
    return StoreError(
        f"could not open {path}: it has format {found}, and this version of CARMA knows formats up to {known}",
        "A newer version of CARMA wrote it. Install that version, or use another CARMA_HOME. The file is unchanged.",
    )


def foreign(path: Path) -> StoreError:
    return StoreError(f"could not open {path}: it is a database of another program, not CARMA's", _KEEP)
