"""The files of the database: how a new one is made, and how a lost one is noticed. A lost one is refused, not replaced.

1. A new database is made under another name and renamed once its tables are committed. An empty file under the final
   name is therefore never a new database.
2. `<database>.last` holds the number of the last event that was acknowledged. A database that ends before that event
   has lost commits: its write-ahead log was removed or shortened, or the file was overwritten with an older copy.
3. A database that is missing although its log or `<database>.last` exists was there before.

The record is written after each commit and never synced. After a power loss it may name an earlier event than the
database holds; it never names a later one, because the commit is synced first. It names the file by device and inode:
a database that was copied, or restored under a new inode, is not compared. Commits without events (past runs, removed
tasks, reserved ids) are not counted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from pathlib import Path
from typing import NamedTuple

from carma.store.schema import check, migrate
from carma.store.store_errors import Identity, empty, identity, missing, outdated

_RECORD = "{:020d} {:020d} {:020d}\n"  # of a fixed length, so that each write replaces the one before


def log_of(path: Path) -> Path:
    """SQLite's write-ahead log of that database."""
    return path.with_name(path.name + "-wal")


def record_of(path: Path) -> Path:
    return path.with_name(path.name + ".last")


class LastEvent(NamedTuple):
    sequence: int
    file: Identity


class LastEventRecord:
    """The number of the last acknowledged event, kept beside the database. Advisory: it never raises."""

    def __init__(self, path: Path) -> None:
        self._file = identity(path)
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(record_of(path), os.O_RDWR | os.O_CREAT, 0o600)

    def write(self, sequence: int) -> None:
        """Call it only after the commit of that event was synced."""
        if self._descriptor >= 0 and self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _RECORD.format(sequence, *self._file).encode(), 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(path: Path) -> LastEvent | None:
    """What the record says; None if there is none, or none that is whole."""
    try:
        sequence, device, inode = (int(word) for word in record_of(path).read_text().split())
    except (OSError, ValueError):
        return None
    return LastEvent(sequence, (device, inode))


def check_existing(path: Path) -> None:
    """Refuse a database that is damaged, of another program or version, or that ends before the last event that was
    acknowledged. Only reads: a connection that may write would move the log into the file when it is closed."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)
    try:
        check(connection, path)
        known, (_, last) = read_record(path), ends(connection)
    finally:
        connection.close()
    if known is not None and known.file == identity(path) and last < known.sequence:
        raise outdated(path, last, known.sequence, record_of(path))


def ends(connection: sqlite3.Connection) -> tuple[int, int]:
    """The sequence number of the checkpoint, and that of the last event there is. Every format has these columns."""
    checkpointed = connection.execute("SELECT coalesce(max(sequence), 0) FROM checkpoint").fetchone()[0]
    last = connection.execute("SELECT coalesce(max(sequence), 0) FROM events").fetchone()[0]
    return int(checkpointed), max(int(checkpointed), int(last))


def prepare(path: Path) -> None:
    """Make sure that there is a database file, private to this user, and that it is not one that was lost."""
    if identity(path) is None:
        for trace in (log_of(path), record_of(path)):
            if os.path.exists(trace) and (trace != log_of(path) or trace.stat().st_size > 0):
                raise missing(path, trace)
        _create(path)
        return  # complete, and no other process has it
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if found.st_size == 0:
        raise empty(path)
    if found.st_mode & 0o077:
        path.chmod(0o600)  # its rows hold the environments of all users
    check_existing(path)


def set_aside(path: Path) -> Path | None:
    """Give the files of a database another name, under which it can still be opened; None if there is no database.

    The record goes last: after a crash half-way the next start finds a database that is missing, not one that is new.
    """
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.old{number}")):
        number += 1
    moved = os.path.lexists(path)
    for suffix in ("", "-wal", "-shm", ".last"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{target}{suffix}")
    _sync_directory(path.parent)
    return target if moved else None


def _create(path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    for suffix in ("", "-journal"):  # of a start that was cut off
        Path(f"{fresh}{suffix}").unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        connection = sqlite3.connect(fresh, isolation_level=None)
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            migrate(connection)  # synced: SQLite's default outside WAL mode
        finally:
            connection.close()
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
