"""The questions about the past: finished tasks, their stories, and the runs that history estimates from."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.events import Durable
from carma.core.model import TaskId
from carma.core.ports import PastRun
from carma.core.task import Task
from carma.store import codec
from carma.store.database import Database

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
        row = (run.key.task, run.key.attempt, run.uid, digest, run.ended_at, codec.write(run))
        with self._database.writing("store a past run in", relaxed=True) as connection:
            connection.execute("INSERT OR IGNORE INTO past_runs VALUES (?, ?, ?, ?, ?, ?)", row)
            connection.execute(
                """DELETE FROM past_runs WHERE (task, attempt) IN (SELECT task, attempt FROM past_runs
                   WHERE uid = ? AND digest = ? ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT -1 OFFSET ?)""",
                (run.uid, digest, RUNS_KEPT),
            )

    def past_runs(self, *, uid: int, command: tuple[str, ...], directory: str, limit: int = 20) -> Sequence[PastRun]:
        with self._database.reading("read past runs from") as connection:
            rows = connection.execute(
                """SELECT body FROM past_runs WHERE uid = ? AND digest = ?
                   ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT ?""",
                (uid, codec.digest(command, directory), max(0, limit)),
            ).fetchall()
            return [codec.read_run(body) for (body,) in rows]
