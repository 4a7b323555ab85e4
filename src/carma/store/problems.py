"""Turns what SQLite and the file system say into a StoreError that names the file and what to do about it.

Nothing here repairs or removes a file: a damaged database is evidence, and its owner decides.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from carma.errors import StoreError

_KEEP = "It was left as it is. Move it aside to start afresh, or put a backup in its place."
_ROOM = "Free some space (or move CARMA_HOME to a larger disk) and try again; nothing was half written."
_PERMIT = "Check the owner and the mode of the file and of its directory; they must belong to the daemon's user."
_BUSY = "Another program holds it open for writing; close that program and try again."


def from_sqlite(error: sqlite3.Error, path: Path, doing: str) -> StoreError:
    """`doing` completes "could not ...": "open", "store 2 events in"."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # drops the extended part
    if primary == sqlite3.SQLITE_FULL:
        return StoreError(f"could not {doing} {path}: the disk is full", _ROOM)
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreError(f"could not {doing} {path}: the file is not a database", _KEEP)
    if primary == sqlite3.SQLITE_CORRUPT:
        return damaged(path, doing, str(error))
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH):
        return StoreError(f"could not {doing} {path}: it cannot be written ({error})", _PERMIT)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"could not {doing} {path}: it is locked ({error})", _BUSY)
    if primary == sqlite3.SQLITE_IOERR:
        return StoreError(f"could not {doing} {path}: the disk refused ({error})", _ROOM)
    return StoreError(f"could not {doing} {path}: {error}", "See the daemon's log for the details.")


def from_os(error: OSError, path: Path, doing: str) -> StoreError:
    why = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return StoreError(f"could not {doing} {path}: {why[:1].lower()}{why[1:]}", _ROOM if full else _PERMIT)


def damaged(path: Path, doing: str, finding: str) -> StoreError:
    return StoreError(f"could not {doing} {path}: the database is damaged ({finding})", _KEEP)


def removed(path: Path, doing: str) -> StoreError:
    return StoreError(
        f"could not {doing} {path}: the file was removed or replaced while the daemon ran, and what is written to it "
        "now would be lost",
        "Put that very file back, or end the daemon with `carma down` and start afresh with `carma up`; "
        "running tasks go on.",
    )


def too_new(path: Path, found: int, known: int) -> StoreError:
    return StoreError(
        f"could not open {path}: it has format {found}, and this version of CARMA knows formats up to {known}",
        "A newer CARMA wrote it. Install that version again, or use another CARMA_HOME. It was left as it is.",
    )


def foreign(path: Path) -> StoreError:
    return StoreError(f"could not open {path}: it is a database of another program, not CARMA's", _KEEP)
