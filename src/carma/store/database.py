"""One connection to the SQLite file: opened with care, one writer, every error turned into a StoreError.

Durability: WAL with synchronous=FULL, so a commit returns after its fsync. `relaxed` transactions survive a killed
process but may be lost, with everything after them, in a power cut; the next full commit makes them durable too.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from carma.errors import StoreError
from carma.store.lock import HomeLock
from carma.store.problems import damaged, from_os, from_sqlite, removed
from carma.store.schema import check, migrate


class Database:
    """Threads may share it: the daemon's loop writes while an estimator reads. They take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.RLock()
        self._closed = False
        _make_private_file(path)
        self._lock = HomeLock(path.with_name(path.name + ".lock"))
        try:
            self._connection = self._open()
            self._file = _identity(path)
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> sqlite3.Connection:
        with self._explained("open"):
            _refuse_emptied(self.path)
            connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
            try:
                check(connection, self.path)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                migrate(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    @contextmanager
    def reading(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._turn, self._explained(doing):
            yield self._living()

    @contextmanager
    def writing(self, doing: str, *, relaxed: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction: committed when the block ends well, rolled back when it raises."""
        with self._turn, self._explained(doing):
            connection = self._living()
            if _identity(self.path) != self._file:
                raise removed(self.path, doing)
            if relaxed:
                connection.execute("PRAGMA synchronous = NORMAL")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                if relaxed:
                    connection.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        """Twice does no harm."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            try:
                self._connection.close()
            finally:
                self._lock.release()

    def _living(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"{self.path} has been closed", "The daemon is ending; start it again with `carma up`.")
        return self._connection

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise from_sqlite(error, self.path, doing) from error
        except msgspec.DecodeError as error:
            raise damaged(self.path, doing, f"a row cannot be read: {error}") from error
        except OSError as error:
            raise from_os(error, self.path, doing) from error


def _make_private_file(path: Path) -> None:
    """Rows hold the environments of all users: only the daemon's user may read the file. SQLite gives the same mode
    to the files it puts beside it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os(error, path, "open") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has that name now. SQLite goes on writing to one that was removed, for nobody to read again."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _refuse_emptied(path: Path) -> None:
    """SQLite takes an empty file for a new database and drops the log beside it, with all that was acknowledged."""
    log = path.with_name(path.name + "-wal")
    if path.stat().st_size == 0 and log.exists() and log.stat().st_size > 0:
        raise damaged(path, "open", f"it is empty although {log.name} is not")
