"""The tables, as an ordered list of migrations from one format to the next.

`PRAGMA application_id` identifies files of CARMA, `PRAGMA user_version` is the format. All migrations run in one
transaction with the version number, so that a crash leaves the old format intact. Never edit a released migration; add
one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.command_pattern import pattern
from carma.store import codec
from carma.store.codec import digest_of, is_short
from carma.store.store_errors import damaged, empty, foreign, too_new

APPLICATION_ID = 0x4341524D  # "CARM"
Migration = Callable[[sqlite3.Connection], None]


def _run(connection: sqlite3.Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(statement)


def _first(connection: sqlite3.Connection) -> None:
    """Format 1. `events` has the events of live tasks; a finished task moves its events to `story`."""
    _run(
        connection,
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "INSERT INTO meta VALUES ('next_task_id', 1)",
        "CREATE TABLE events (sequence INTEGER PRIMARY KEY, at REAL NOT NULL, task INTEGER, body TEXT NOT NULL)",
        "CREATE INDEX events_of_task ON events (task, sequence) WHERE task IS NOT NULL",
        # One row: the checkpoint without its tasks, and the order of the tasks, which are rows of `live`.
        """CREATE TABLE checkpoint (id INTEGER PRIMARY KEY CHECK (id = 1), sequence INTEGER NOT NULL,
           body TEXT NOT NULL, task_order TEXT NOT NULL)""",
        "CREATE TABLE live (id INTEGER PRIMARY KEY, body TEXT NOT NULL)",
        # `restored`: the task was taken out to be retried; only the story of the row is valid.
        """CREATE TABLE finished (id INTEGER PRIMARY KEY, uid INTEGER NOT NULL, ended_at REAL NOT NULL,
           restored INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL, story TEXT NOT NULL)""",
        "CREATE INDEX finished_by_end ON finished (ended_at, id)",
        "CREATE INDEX finished_by_owner ON finished (uid, ended_at, id)",
        """CREATE TABLE past_runs (task INTEGER NOT NULL, attempt INTEGER NOT NULL, uid INTEGER NOT NULL,
           digest BLOB NOT NULL, ended_at REAL NOT NULL, body TEXT NOT NULL, PRIMARY KEY (task, attempt))""",
        "CREATE INDEX past_runs_by_command ON past_runs (uid, digest, ended_at)",
    )


def _usage(connection: sqlite3.Connection) -> None:
    """Format 2: hourly use of each GPU, in columns instead of JSON, so that SQLite can add to rows."""
    connection.execute(
        """CREATE TABLE gpu_usage (gpu TEXT NOT NULL, hour INTEGER NOT NULL, watched_s REAL NOT NULL,
           held_s REAL NOT NULL, shared_s REAL NOT NULL, sm_s REAL NOT NULL, energy_j REAL NOT NULL,
           idle_j REAL NOT NULL, tasks_j REAL NOT NULL, PRIMARY KEY (hour, gpu)) WITHOUT ROWID"""
    )


def _guessed(connection: sqlite3.Connection) -> None:
    """Format 3: time in which idle power was assumed."""
    connection.execute("ALTER TABLE gpu_usage ADD COLUMN guessed_s REAL NOT NULL DEFAULT 0.0")


def _near(connection: sqlite3.Connection) -> None:
    """Format 4: an index of past runs by their command without its numbers."""
    connection.execute("ALTER TABLE past_runs ADD COLUMN pattern BLOB NOT NULL DEFAULT x''")
    rows = connection.execute("SELECT task, attempt, body FROM past_runs").fetchall()
    runs = ((task, attempt, codec.read_run(body)) for task, attempt, body in rows)
    connection.executemany(
        "UPDATE past_runs SET pattern = ? WHERE task = ? AND attempt = ?",
        ((codec.digest(pattern(run.command), run.directory), task, attempt) for task, attempt, run in runs),
    )
    connection.execute("CREATE INDEX past_runs_by_pattern ON past_runs (uid, pattern, ended_at)")


def _shared(connection: sqlite3.Connection) -> None:
    """Format 5: environments and long commands are rows of `parts` (codec.py); `finished` has the kind of the
    outcome. It edits JSON, because later versions can change the structs."""
    _run(
        connection,
        "CREATE TABLE parts (digest TEXT PRIMARY KEY, body TEXT NOT NULL)",
        "ALTER TABLE finished RENAME TO finished_4",
        "DROP INDEX finished_by_end",
        "DROP INDEX finished_by_owner",
        # Long columns come last, because SQLite reads a row only up to the last needed column.
        """CREATE TABLE finished (id INTEGER PRIMARY KEY, uid INTEGER NOT NULL, ended_at REAL NOT NULL,
           kind TEXT NOT NULL, restored INTEGER NOT NULL DEFAULT 0, environment TEXT, command TEXT,
           body TEXT NOT NULL, story TEXT NOT NULL)""",
    )
    for table, column, key in (("events", "body", "sequence"), ("live", "body", "id")):
        for number, body in _rows(connection, f"SELECT {key}, {column} FROM {table} WHERE {key} > ?"):
            if (packed := _packed(connection, msgspec.json.decode(body))) is not None:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (packed, number))
    _pack_finished(connection)
    _run(
        connection,
        "DROP TABLE finished_4",
        "CREATE INDEX finished_by_end ON finished (ended_at, id, kind)",
        "CREATE INDEX finished_by_owner ON finished (uid, ended_at, id, kind)",
        "CREATE INDEX finished_by_environment ON finished (environment) WHERE environment IS NOT NULL",
        "CREATE INDEX finished_by_command ON finished (command) WHERE command IS NOT NULL",
    )


def _pack_finished(connection: sqlite3.Connection) -> None:
    rows = "SELECT id, uid, ended_at, restored, body, story FROM finished_4 WHERE id > ?"
    for number, uid, ended_at, restored, body, story in _rows(connection, rows):
        task, lines = msgspec.json.decode(body), msgspec.json.decode(story)
        kind = task["status"]["outcome"]["kind"]
        body, story = _packed(connection, task) or body, _packed(connection, lines) or story
        environment, command = _references(task["spec"])
        row = (number, uid, ended_at, kind, restored, environment, command, body, story)
        connection.execute("INSERT INTO finished VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


_BATCH = 200  # rows in memory at a time: a row of format 4 can have megabytes


def _rows(connection: sqlite3.Connection, statement: str) -> Iterator[tuple[Any, ...]]:
    """All rows in the order of the first column, the key. The caller may change rows meanwhile."""
    last = -1
    while rows := connection.execute(f"{statement} ORDER BY 1 LIMIT {_BATCH}", (last,)).fetchall():
        yield from rows
        last = rows[-1][0]


def _packed(connection: sqlite3.Connection, value: Any) -> str | None:
    """A task, an event or a list of events in format 5; None if nothing changed. Changes `value`."""
    changed = False
    for one in value if isinstance(value, list) else [value]:
        spec = one.get("spec") or (one["task"]["spec"] if one.get("event") == "task_restored" else None)
        if spec is None:
            continue
        for field in ("environment", "command"):
            found = spec.get(field) or {}
            if not is_short(found if isinstance(found, dict) else tuple(found)):
                body = msgspec.json.encode(found).decode()
                digest = digest_of(body)
                connection.execute("INSERT OR IGNORE INTO parts VALUES (?, ?)", (digest, body))
                spec[field] = {"": digest} if field == "environment" else ["", digest]
                changed = True
    return msgspec.json.encode(value).decode() if changed else None


def _references(spec: dict[str, Any]) -> tuple[str | None, str | None]:
    environment, command = spec.get("environment", {}), spec["command"]
    return environment.get(""), command[1] if len(command) == 2 and command[0] == "" else None


def _ended_and_metrics(connection: sqlite3.Connection) -> None:
    """Format 6: an ended attempt is the status `ended` (it was `recovering` without a time), and the metrics that a
    GPU provides are a list of names (they were one truth value each)."""
    for number, body in _rows(connection, "SELECT id, body FROM live WHERE id > ?"):
        task = msgspec.json.decode(body)
        status = task["status"]
        if status["state"] == "recovering" and status.get("until") is None:
            outcome = task["attempts"][-1]["outcome"]
            held = status.get("held", False)
            task["status"] = {"state": "ended", "at": status["since"], "outcome": outcome, "held": held}
            connection.execute("UPDATE live SET body = ? WHERE id = ?", (msgspec.json.encode(task).decode(), number))
    _name_metrics(connection)


_METRICS_OF_FORMAT_5 = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "tensor_active")


def _name_metrics(connection: sqlite3.Connection) -> None:
    for table, key, found in (("events", "sequence", "task IS NULL"), ("checkpoint", "id", "TRUE")):
        for number, body in _rows(connection, f"SELECT {key}, body FROM {table} WHERE {found} AND {key} > ?"):
            value = msgspec.json.decode(body)
            for provided in (gpu["capabilities"] for gpu in value.get("gpus", ()) if "capabilities" in gpu):
                provided["metrics"] = [name for name in _METRICS_OF_FORMAT_5 if provided.pop(name, False)]
            text = msgspec.json.encode(value).decode()
            connection.execute(f"UPDATE {table} SET body = ? WHERE {key} = ?", (text, number))


MIGRATIONS: tuple[Migration, ...] = (_first, _usage, _guessed, _near, _shared, _ended_and_metrics)


def check(connection: sqlite3.Connection, path: Path, known: int = len(MIGRATIONS), *, indexes: bool = False) -> None:
    """Refuse a file that is foreign, too new or damaged. Read-only, because such a file must not change. `indexes`:
    also compare all indexes with their tables, which takes several times as long."""
    application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        raise empty(path)
    if application != APPLICATION_ID:
        raise foreign(path)
    if version > known:
        raise too_new(path, version, known)
    pragma = "integrity_check" if indexes else "quick_check"
    finding = connection.execute(f"PRAGMA {pragma}(1)").fetchone()[0]
    if finding != "ok":
        raise damaged(path, "open", str(finding).replace("\n", " "))


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the file to the newest format, in one transaction."""
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
