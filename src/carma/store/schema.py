"""The tables and how they came to be: an ordered list of migrations, each taking the file one format further.

`PRAGMA application_id` says that the file is ours, `PRAGMA user_version` which format it has. A migration runs in one
transaction with its version number, so that a crash leaves the older format whole. Never edit a released migration;
add one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from carma.core.pattern import pattern
from carma.store import codec
from carma.store.problems import damaged, foreign, too_new

APPLICATION_ID = 0x4341524D  # "CARM"
Migration = Callable[[sqlite3.Connection], None]


def _first(connection: sqlite3.Connection) -> None:
    """Format 1. `events` keeps what live tasks went through; a finished task takes its events into `story`."""
    for statement in (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "INSERT INTO meta VALUES ('next_task_id', 1)",
        "CREATE TABLE events (sequence INTEGER PRIMARY KEY, at REAL NOT NULL, task INTEGER, body TEXT NOT NULL)",
        "CREATE INDEX events_of_task ON events (task, sequence) WHERE task IS NOT NULL",
        # One row: the checkpoint without its tasks, and the order of the tasks, which are rows of `live`.
        """CREATE TABLE checkpoint (id INTEGER PRIMARY KEY CHECK (id = 1), sequence INTEGER NOT NULL,
           body TEXT NOT NULL, task_order TEXT NOT NULL)""",
        "CREATE TABLE live (id INTEGER PRIMARY KEY, body TEXT NOT NULL)",
        # `restored`: the task was taken out again to be retried; its story stays, the row is no answer meanwhile.
        """CREATE TABLE finished (id INTEGER PRIMARY KEY, uid INTEGER NOT NULL, ended_at REAL NOT NULL,
           restored INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL, story TEXT NOT NULL)""",
        "CREATE INDEX finished_by_end ON finished (ended_at, id)",
        "CREATE INDEX finished_by_owner ON finished (uid, ended_at, id)",
        """CREATE TABLE past_runs (task INTEGER NOT NULL, attempt INTEGER NOT NULL, uid INTEGER NOT NULL,
           digest BLOB NOT NULL, ended_at REAL NOT NULL, body TEXT NOT NULL, PRIMARY KEY (task, attempt))""",
        "CREATE INDEX past_runs_by_command ON past_runs (uid, digest, ended_at)",
    ):
        connection.execute(statement)


def _usage(connection: sqlite3.Connection) -> None:
    """Format 2: what each GPU did, hour by hour. Columns and not JSON, so that rows are added up where they lie."""
    connection.execute(
        """CREATE TABLE gpu_usage (gpu TEXT NOT NULL, hour INTEGER NOT NULL, watched_s REAL NOT NULL,
           held_s REAL NOT NULL, shared_s REAL NOT NULL, sm_s REAL NOT NULL, energy_j REAL NOT NULL,
           idle_j REAL NOT NULL, tasks_j REAL NOT NULL, PRIMARY KEY (hour, gpu)) WITHOUT ROWID"""
    )


def _guessed(connection: sqlite3.Connection) -> None:
    """Format 3: for how long what a GPU takes idle was a guess."""
    connection.execute("ALTER TABLE gpu_usage ADD COLUMN guessed_s REAL NOT NULL DEFAULT 0.0")


def _near(connection: sqlite3.Connection) -> None:
    """Format 4: past runs can be found by their command without its numbers."""
    connection.execute("ALTER TABLE past_runs ADD COLUMN pattern BLOB NOT NULL DEFAULT x''")
    rows = connection.execute("SELECT task, attempt, body FROM past_runs").fetchall()
    runs = ((task, attempt, codec.read_run(body)) for task, attempt, body in rows)
    connection.executemany(
        "UPDATE past_runs SET pattern = ? WHERE task = ? AND attempt = ?",
        ((codec.digest(pattern(run.command), run.directory), task, attempt) for task, attempt, run in runs),
    )
    connection.execute("CREATE INDEX past_runs_by_pattern ON past_runs (uid, pattern, ended_at)")


MIGRATIONS: tuple[Migration, ...] = (_first, _usage, _guessed, _near)


def check(connection: sqlite3.Connection, path: Path, known: int = len(MIGRATIONS)) -> None:
    """Refuse what is not ours, too new or damaged. Only reads: nothing may touch such a file."""
    application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not (empty and application == 0 and version == 0):
        raise foreign(path)
    if version > known:
        raise too_new(path, version, known)
    finding = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if finding != "ok":
        raise damaged(path, "open", str(finding).replace("\n", " "))


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the file to the newest format, all steps or none."""
    if _pragma(connection, "user_version") == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in range(_pragma(connection, "user_version"), len(migrations)):
            migrations[number](connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
