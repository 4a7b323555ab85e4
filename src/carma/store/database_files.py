"""The files of the database: creates a new one, and detects a lost one, which is refused and not replaced.

1. A new database is created under another name and renamed once its tables are committed. An empty file under the
   final name is therefore never a new database.
2. `<database>.last` has the number of the last acknowledged event. A database that ends before that event has lost
   commits: its write-ahead log was removed or truncated, or the file was overwritten with an older copy.
3. A missing database whose log or `<database>.last` exists was lost.

The record is written after each commit and never synced. After a power cut it can have an earlier event than the
database, never a later one, because the commit is synced first. It identifies the file by device and inode: a copied or
restored database is not compared. Commits without events (past runs, removed tasks, reserved ids) do not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from pathlib import Path

from carma.store.schema import check, migrate
from carma.store.store_errors import FileIdentity, empty, identity, missing, outdated

_RECORD = "{:020d} {:020d} {:020d}\n"  # of fixed length, so that each write replaces the previous one


def log_of(path: Path) -> Path:
    """SQLite's write-ahead log of a database."""
    return path.with_name(path.name + "-wal")


def record_of(path: Path) -> Path:
    return path.with_name(path.name + ".last")


class LastEventRecord:
    """The number of the last acknowledged event, in a file beside the database. Advisory: it never raises."""

    def __init__(self, path: Path) -> None:
        self._file = identity(path)
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(record_of(path), os.O_RDWR | os.O_CREAT, 0o600)

    def write(self, sequence: int) -> None:
        """Writes the number of an event. Called only after the commit of that event was synced."""
        if self._descriptor >= 0 and self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _RECORD.format(sequence, *self._file).encode(), 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(path: Path) -> tuple[int, FileIdentity] | None:
    """The last event and the file that has it; None if it is missing or incomplete."""
    try:
        sequence, device, inode = (int(word) for word in record_of(path).read_text().split())
    except (OSError, ValueError):
        return None
    return sequence, (device, inode)


def check_existing(path: Path) -> None:
    """Refuse a database that is damaged, of another program or version, or that lost acknowledged events.

    The indexes of a copied or restored database are checked too: a copy of the files of a running daemon can have pages
    of different moments. Read-only: closing a connection that can write would move the log into the file.
    """
    known = read_record(path)
    is_own = known is not None and known[1] == identity(path)
    address = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=5.0, isolation_level=None)) as connection:
        check(connection, path, indexes=not is_own)
        _, last = ends(connection)
    if known is not None and is_own and last < known[0]:
        raise outdated(path, last, known[0], record_of(path))


def ends(connection: sqlite3.Connection) -> tuple[int, int]:
    """Sequence numbers of the checkpoint and of the last event. Every format has these columns."""
    checkpointed = connection.execute("SELECT coalesce(max(sequence), 0) FROM checkpoint").fetchone()[0]
    last = connection.execute("SELECT coalesce(max(sequence), 0) FROM events").fetchone()[0]
    return int(checkpointed), max(int(checkpointed), int(last))


def prepare(path: Path) -> None:
    """Ensure that there is a database file, private to this user, and that the database was not lost."""
    if identity(path) is None:
        for trace in (log_of(path), record_of(path)):
            if os.path.exists(trace) and (trace != log_of(path) or trace.stat().st_size > 0):
                raise missing(path, trace)
        _create(path)
        return  # complete and exclusive
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if found.st_size == 0:
        raise empty(path)
    if found.st_mode & 0o077:
        path.chmod(0o600)  # its rows have the environments of all users
    check_existing(path)


def set_aside(path: Path) -> Path | None:
    """Rename the files of a database, so that it can still be opened; returns None if there is no database.

    The record is renamed last: after a crash half-way the next start finds a missing database, not a new one.
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
    for suffix in ("", "-journal"):  # of an interrupted start
        Path(f"{fresh}{suffix}").unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            migrate(connection)  # synced: SQLite's default outside WAL mode
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
