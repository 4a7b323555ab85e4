"""Databases of older formats, made by the migrations up to that format."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from carma.store.schema import MIGRATIONS, migrate


def make_old(path: Path, version: int) -> sqlite3.Connection:
    """An empty database of that format. Files of format 4 and older have no incremental vacuum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    migrate(connection, MIGRATIONS[:version])
    return connection
