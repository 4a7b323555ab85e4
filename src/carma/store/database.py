"""Connections to the SQLite file: one for writing, several for reading. Every error becomes a StoreError.

Durability: WAL with synchronous=FULL, so that a commit returns after its fsync. `relaxed` transactions survive a killed
process, but a power cut can lose them; the next full commit makes them durable. Reads and commits do not delay each
other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from carma.errors import StoreError
from carma.store import database_files as files
from carma.store.lock import HomeLock
from carma.store.schema import migrate
from carma.store.store_errors import damaged, from_os, from_sqlite, identity, removed

log = logging.getLogger("carma.store")

READERS = 4  # idle connections for reading
LOG_BYTES = 16 << 20  # SQLite truncates the write-ahead log to this size when it restarts the log
BUSY_S = 5.0  # wait for a lock of another program
_INCREMENTAL = 2  # of PRAGMA auto_vacuum


class Database:
    """Can be shared by threads. Writers take turns; readers see the last commit and never wait."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """`new`: rename the files of an existing database and start with an empty one."""
        self.path = path
        self._turn = threading.RLock()
        self._closed = self._lost = False
        self._idle: list[sqlite3.Connection] = []  # for reading
        with self._explained("open"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = HomeLock(path.with_name(path.name + ".lock"))
        try:
            self._connection = self._open(new=new)
            self._files = self._identities()
        except BaseException:
            self._lock.release()
            raise

    def _open(self, *, new: bool) -> sqlite3.Connection:
        with self._explained("open"):
            if new and (kept := files.set_aside(self.path)) is not None:
                log.warning("starting with an empty database; the old one is %s", kept)
            files.prepare(self.path)
            connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
                migrate(connection)
                self._allow_shrinking(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _allow_shrinking(self, connection: sqlite3.Connection) -> None:
        """Databases of format 4 and older get incremental vacuum, which needs a VACUUM and space for a copy."""
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
            return
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        disk = os.statvfs(self.path.parent)
        if disk.f_bavail * disk.f_frsize < 3 * (pages - free) * size + LOG_BYTES:
            log.warning("%s cannot be shrunk: the disk has no space for a copy", self.path)
            return
        try:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("VACUUM")
        except sqlite3.Error as error:  # rolled back; the next start tries again
            log.warning("%s cannot be shrunk: %s", self.path, error)

    def in_place(self) -> bool:
        """Whether the opened files are still the files under their names."""
        try:
            return not self._lost and self._identities() == self._files
        except OSError:  # unknown: the disk does not answer
            return True

    def _identities(self) -> tuple[object, object]:
        return identity(self.path), identity(files.log_of(self.path))

    @contextmanager
    def reading(self, doing: str) -> Iterator[sqlite3.Connection]:
        """A connection that sees the newest state of the database, unchanged until the block ends."""
        with self._explained(doing):
            connection = self._reader(doing)
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("COMMIT")
                self._give_back(connection)

    def _reader(self, doing: str) -> sqlite3.Connection:
        with contextlib.suppress(IndexError):
            return self._idle.pop()  # atomic; so is append
        self._usable(doing)
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if self._closed or len(self._idle) >= READERS:
            connection.close()
        else:
            self._idle.append(connection)

    @contextmanager
    def writing(self, doing: str, *, relaxed: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction, committed at the end of the block, rolled back if the block raises."""
        with self._turn, self._explained(doing):
            connection = self._usable(doing)
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
            if not self.in_place():  # the commit went to a deleted file: not durable, and not to be undone
                self._lost = True
                raise removed(self.path, doing)

    def shrink(self, pages: int) -> int:
        """Return at most `pages` free pages to the file system; returns the number left. Relaxed."""
        with self._turn, self._explained("shrink"):
            connection = self._usable("shrink")
            connection.execute("PRAGMA synchronous = NORMAL")
            try:
                connection.executescript(f"PRAGMA incremental_vacuum({pages})")  # `execute` stops after one page
                left = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
                if left == 0:
                    connection.execute("PRAGMA busy_timeout = 0")  # commits must not wait behind a long read
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
                connection.execute("PRAGMA synchronous = FULL")
            can = connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL
            return left if can else 0

    def close(self) -> None:
        """Calling it again has no effect."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            try:
                while self._idle:
                    self._idle.pop().close()
                self._connection.close()
            finally:
                self._lock.release()

    def _usable(self, doing: str) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"{self.path} has been closed", "The daemon is ending; start it again with `carma up`.")
        if not self.in_place():
            raise removed(self.path, doing)
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
