"""Turns a database of today into one of an older format."""

from __future__ import annotations

import sqlite3


def without_patterns(connection: sqlite3.Connection) -> None:
    """The table as it was up to format 3."""
    connection.execute("DROP INDEX past_runs_by_pattern")
    connection.execute("ALTER TABLE past_runs DROP COLUMN pattern")
