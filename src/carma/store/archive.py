"""The archive: finished tasks, their stories, the past runs for estimates, and the hourly use of GPUs."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from functools import cache

import msgspec
from msgspec.structs import replace

from carma.command_pattern import pattern
from carma.core.model.events import Durable
from carma.core.model.task import Task
from carma.core.model.values import GpuId, GpuUsage, TaskId
from carma.core.ports import HistoryQuery, PastRun, TaskPage
from carma.store import codec
from carma.store.codec import Parts, ReadPart, Value
from carma.store.database import Database

HOUR_S = 3600
SUMS = tuple(name for name in GpuUsage.__struct_fields__ if name not in ("gpu", "hour"))  # columns have these names
PAGE_BYTES = 8 << 20  # a page ends early when its rows and commands have more
RUNS_KEPT = 50  # past runs per command: more do not change an estimate, and the file must not grow without limit


class SqliteArchive:
    """Implements core.ports.Archive, `prune` and `shrink`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._parts = Parts()
        self._knows_all_parts = False  # whether the registry has the parts of all unfinished tasks

    def task(self, task: TaskId) -> Task | None:
        with self._database.reading(f"read task {task} from") as connection:
            row = connection.execute("SELECT body FROM finished WHERE id = ? AND NOT restored", (task,)).fetchone()
            return self._parts.unpack(codec.read_task(row[0]), part_reader(connection)) if row else None

    def tasks(self, ids: Collection[TaskId]) -> Sequence[Task]:
        found: list[Task] = []
        with self._database.reading("read finished tasks from") as connection:
            read = part_reader(connection)
            for task in ids:
                rows = connection.execute("SELECT body FROM finished WHERE id = ? AND NOT restored", (task,))
                found += [self._listed(body, read) for (body,) in rows]
        return found

    def page(self, query: HistoryQuery = HistoryQuery()) -> TaskPage:
        where, values = _conditions(query)
        statement = f"SELECT body FROM finished WHERE {where} ORDER BY ended_at DESC, id DESC LIMIT ?"
        tasks: list[Task] = []
        room = PAGE_BYTES
        with self._database.reading("read finished tasks from") as connection:
            read = part_reader(connection)
            rows = connection.execute(statement, (*values, max(0, query.limit) + 1))
            for (body,) in rows:
                if len(tasks) >= query.limit or room <= 0:
                    return TaskPage(tasks, more=len(tasks) > 0)
                tasks.append(self._listed(body, read))
                room -= len(body) + sum(map(len, tasks[-1].spec.command))
        return TaskPage(tasks, more=False)

    def _listed(self, body: str, read: ReadPart) -> Task:
        """The task without its environment, which lists do not show and which can have megabytes."""
        task = codec.read_task(body)
        return self._parts.unpack(replace(task, spec=replace(task.spec, environment={})), read)

    def story(self, task: TaskId) -> Sequence[Durable]:
        """All events of a live or finished task, in order."""
        with self._database.reading(f"read the story of task {task} from") as connection:
            read = part_reader(connection)
            row = connection.execute("SELECT story FROM finished WHERE id = ?", (task,)).fetchone()
            archived = codec.read_events(row[0]) if row else ()
            rows = connection.execute("SELECT body FROM events WHERE task = ? ORDER BY sequence", (task,)).fetchall()
            events = (*archived, *(codec.read_event(body) for (body,) in rows))
            return [self._parts.unpack(event, read) for event in events]

    def prune(self, ended_before: float, limit: int = 1_000) -> Sequence[TaskId]:
        """Remove at most `limit` finished tasks that ended before this time, oldest first; returns their ids.

        Past runs stay: they are limited per command, and estimates need them.
        """
        with self._database.writing("remove old tasks from") as connection:
            rows = connection.execute(
                """DELETE FROM finished WHERE id IN (SELECT id FROM finished WHERE ended_at < ? AND NOT restored
                   ORDER BY ended_at, id LIMIT ?) RETURNING id, environment, command""",
                (ended_before, limit),
            ).fetchall()
            self._drop_unused(connection, {part for _, *parts in rows for part in parts if part is not None})
            return [TaskId(task) for task, *_ in sorted(rows)]

    def _drop_unused(self, connection: sqlite3.Connection, digests: Collection[str]) -> None:
        """Delete the parts that no other task uses. The registry has the parts of unfinished tasks."""
        if not self._knows_all_parts:
            return
        connection.executemany(
            """DELETE FROM parts WHERE digest = :digest
               AND NOT EXISTS (SELECT 1 FROM finished WHERE environment = :digest)
               AND NOT EXISTS (SELECT 1 FROM finished WHERE command = :digest)""",
            [{"digest": digest} for digest in digests if digest not in self._parts],
        )

    def shrink(self, pages: int = 250) -> int:
        """Return some of the pages that `prune` freed to the file system; returns the number left."""
        return self._database.shrink(pages)

    def remember(self, run: PastRun) -> None:
        """Idempotent by key: the first run of a key stays."""
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

    def past_runs(
        self, *, uid: int, command: tuple[str, ...], directory: str, near: bool = False, limit: int = 20
    ) -> Sequence[PastRun]:
        column, key = ("pattern", pattern(command)) if near else ("digest", command)
        with self._database.reading("read past runs from") as connection:
            rows = connection.execute(
                f"""SELECT body FROM past_runs WHERE uid = ? AND {column} = ?
                   ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT ?""",
                (uid, codec.digest(key, directory), max(0, limit)),
            ).fetchall()
            return [codec.read_run(body) for (body,) in rows]


def add_usage(connection: sqlite3.Connection, rows: Sequence[GpuUsage]) -> None:
    """Add to the rows of the same GPU and hour. There are 24 rows per day and GPU, so none are deleted."""
    added = ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)
    statement = f"""INSERT INTO gpu_usage (gpu, hour, {", ".join(SUMS)}) VALUES (?, ?{", ?" * len(SUMS)})
                    ON CONFLICT (hour, gpu) DO UPDATE SET {added}"""
    connection.executemany(statement, [(row.gpu, row.hour, *(getattr(row, name) for name in SUMS)) for row in rows])


def _conditions(query: HistoryQuery) -> tuple[str, list[float | str]]:
    """The WHERE clause of `HistoryQuery.has`, with its values."""
    conditions = ["NOT restored"]
    values: list[float | str] = []
    for condition, value in (("uid = ?", query.uid), ("ended_at >= ?", query.since)):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if query.kinds is not None:
        conditions.append(f"kind IN ({', '.join('?' * len(query.kinds))})")
        values.extend(query.kinds)
    if query.before is not None:
        conditions.append("(ended_at, id) < (?, ?)")
        values.extend(query.before)
    return " AND ".join(conditions), values


def part_reader(connection: sqlite3.Connection) -> ReadPart:
    """A function that reads rows of `parts`, each once."""

    @cache
    def read(digest: str) -> Value:
        row = connection.execute("SELECT body FROM parts WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise msgspec.DecodeError(f"its part {digest} is missing")
        return codec.read_part(row[0])

    return read
