"""The questions about the past: finished tasks, their stories, and the runs that history estimates from."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from carma.core.events import Durable
from carma.core.model import GpuId, GpuUsage, TaskId
from carma.core.pattern import pattern
from carma.core.ports import PastRun
from carma.core.task import Task
from carma.store import codec
from carma.store.database import Database

HOUR_S = 3600
SUMS = tuple(name for name in GpuUsage.__struct_fields__ if name not in ("gpu", "hour"))  # columns have these names
RUNS_KEPT = 50  # of each command; more would not change an estimate, and a sweep must not grow the file without end


class SqliteArchive:
    """Implements core.ports.Archive, and `story`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def task(self, task: TaskId) -> Task | None:
        with self._database.reading(f"read task {task} from") as connection:
            row = connection.execute("SELECT body FROM finished WHERE id = ? AND NOT restored", (task,)).fetchone()
            return codec.read_task(row[0]) if row else None

    def tasks(self, *, uid: int | None = None, since: float | None = None, limit: int = 100) -> Sequence[Task]:
        """Newest end first. `since` includes that very moment."""
        conditions = ["NOT restored"]
        values: list[float] = []
        if uid is not None:
            conditions.append("uid = ?")
            values.append(uid)
        if since is not None:
            conditions.append("ended_at >= ?")
            values.append(since)
        where = " AND ".join(conditions)
        statement = f"SELECT body FROM finished WHERE {where} ORDER BY ended_at DESC, id DESC LIMIT ?"
        with self._database.reading("read finished tasks from") as connection:
            rows = connection.execute(statement, (*values, max(0, limit))).fetchall()
            return [codec.read_task(body) for (body,) in rows]

    def story(self, task: TaskId) -> Sequence[Durable]:
        """All that happened to a task, in order, whether it is live or finished."""
        with self._database.reading(f"read the story of task {task} from") as connection:
            row = connection.execute("SELECT story FROM finished WHERE id = ?", (task,)).fetchone()
            told = codec.read_events(row[0]) if row else ()
            rows = connection.execute("SELECT body FROM events WHERE task = ? ORDER BY sequence", (task,)).fetchall()
            return [*told, *(codec.read_event(body) for (body,) in rows)]

    def prune(self, ended_before: float) -> Sequence[TaskId]:
        """Forget finished tasks that ended before this time; returns which, so that their logs can go too.

        Past runs stay: they are few for each command, and estimates rest on them.
        """
        with self._database.writing("remove old tasks from") as connection:
            rows = connection.execute(
                "DELETE FROM finished WHERE ended_at < ? AND NOT restored RETURNING id", (ended_before,)
            ).fetchall()
            return [TaskId(task) for (task,) in sorted(rows)]

    def remember(self, run: PastRun) -> None:
        """Idempotent by key: the first report of an attempt stays."""
        digest = codec.digest(run.command, run.directory)
        near = codec.digest(pattern(run.command), run.directory)
        row = (run.key.task, run.key.attempt, run.uid, digest, run.ended_at, codec.write(run), near)
        with self._database.writing("store a past run in", relaxed=True) as connection:
            connection.execute("INSERT OR IGNORE INTO past_runs VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute(
                """DELETE FROM past_runs WHERE (task, attempt) IN (SELECT task, attempt FROM past_runs
                   WHERE uid = ? AND digest = ? ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT -1 OFFSET ?)""",
                (run.uid, digest, RUNS_KEPT),
            )

    def usage(self, *, since: float, until: float) -> Sequence[GpuUsage]:
        """The hours that begin within [since, until), oldest first."""
        with self._database.reading("read the use of GPUs from") as connection:
            rows = connection.execute(
                f"""SELECT gpu, hour, {", ".join(SUMS)} FROM gpu_usage
                    WHERE hour * ? >= ? AND hour * ? < ? ORDER BY hour, gpu""",
                (HOUR_S, since, HOUR_S, until),
            ).fetchall()
        return [GpuUsage(gpu=GpuId(gpu), hour=hour, **dict(zip(SUMS, sums, strict=True))) for gpu, hour, *sums in rows]

    def past_runs(self, *, uid: int, command: tuple[str, ...], directory: str, limit: int = 20) -> Sequence[PastRun]:
        return self._runs("digest", uid, codec.digest(command, directory), limit)

    def near_runs(self, *, uid: int, command: tuple[str, ...], directory: str, limit: int = 200) -> Sequence[PastRun]:
        return self._runs("pattern", uid, codec.digest(pattern(command), directory), limit)

    def _runs(self, column: str, uid: int, digest: bytes, limit: int) -> Sequence[PastRun]:
        with self._database.reading("read past runs from") as connection:
            rows = connection.execute(
                f"""SELECT body FROM past_runs WHERE uid = ? AND {column} = ?
                   ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT ?""",
                (uid, digest, max(0, limit)),
            ).fetchall()
            return [codec.read_run(body) for (body,) in rows]


def add_usage(connection: sqlite3.Connection, rows: Sequence[GpuUsage]) -> None:
    """Add to what is known of the same GPU and hour; 24 rows a day and GPU, so none are dropped."""
    added = ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)
    statement = f"""INSERT INTO gpu_usage (gpu, hour, {", ".join(SUMS)}) VALUES (?, ?{", ?" * len(SUMS)})
                    ON CONFLICT (hour, gpu) DO UPDATE SET {added}"""
    connection.executemany(statement, [(row.gpu, row.hour, *(getattr(row, name) for name in SUMS)) for row in rows])
