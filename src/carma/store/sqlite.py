"""The store in one SQLite file: the log of durable events, and checkpoints that keep it short.

Acknowledgements depend on `append`: when it returns, the events survive a power cut. The events of a live task stay
after a checkpoint, for its story; `load` gives only later ones. When a task moves to the archive, its events do too.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from carma.core.model.events import Durable, TaskRestored, UseNoted, task_of
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import TaskId, TaskSpec, tag_of
from carma.core.ports import Checkpoint, Loaded
from carma.errors import StoreError
from carma.store import codec
from carma.store.archive import SqliteArchive, add_usage, part_reader
from carma.store.codec import ReadPart, SharedValue, Value, reference
from carma.store.database import Database
from carma.store.database_files import LastEventRecord, ends
from carma.store.store_errors import damaged

ID_BLOCK = 32


class SqliteStore(SqliteArchive):
    """Implements core.ports.Store and Archive. It locks the directory, so that it is the only writer."""

    def __init__(self, path: Path | str, *, new: bool = False) -> None:
        """`new`: rename an existing database and start with an empty one."""
        super().__init__(Database(Path(path), new=new))
        self._ids = threading.Lock()
        self._appending = threading.Lock()  # from the first number of an event to the commit that makes it the last one
        self._next_id = self._reserved_to = 0
        self._written: dict[TaskId, Task] = {}  # contents of `live`, so that only changed tasks are written
        try:
            with self._database.reading("open") as connection:
                self._checkpointed, self._sequence = ends(connection)
        except BaseException:
            self._database.close()
            raise
        self._record = LastEventRecord(self.path)
        self._record.write(self._sequence)
        self._knows_all_parts = self._sequence == 0

    @property
    def path(self) -> Path:
        return self._database.path

    def append(self, events: Sequence[Durable]) -> int:
        if not events:
            return self._sequence
        with self._appending:
            return self._append(events)

    def _append(self, events: Sequence[Durable]) -> int:
        used: dict[str, SharedValue] = {}
        bodies = [codec.write_event(self._parts.pack(event, used)) for event in events]
        with self._database.writing("save the change in") as connection:
            _store_parts(connection, used.values())
            rows = [
                (self._sequence + place, event.at, task_of(event), body)
                for place, (event, body) in enumerate(zip(events, bodies, strict=True), start=1)
            ]
            connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
            for event in events:
                if isinstance(event, TaskRestored):
                    connection.execute("UPDATE finished SET restored = 1 WHERE id = ?", (event.task.id,))
                elif isinstance(event, UseNoted):
                    add_usage(connection, event.gpus)
        self._sequence = rows[-1][0]
        self._record.write(self._sequence)
        for part in used.values():
            part.stored, part.sequence = True, self._sequence
        return self._sequence

    def load(self) -> Loaded:
        with self._database.reading("load") as connection:
            read = self._registering(part_reader(connection))
            checkpoint = self._read_checkpoint(connection, read)
            after = checkpoint.sequence if checkpoint else 0
            rows = connection.execute(
                "SELECT sequence, body FROM events WHERE sequence > ? ORDER BY sequence", (after,)
            ).fetchall()
            if [sequence for sequence, _ in rows] != list(range(after + 1, after + 1 + len(rows))):
                raise damaged(self.path, "load", f"events after number {after} are missing")
            self._written = {task.id: task for task in checkpoint.tasks} if checkpoint else {}
            events = tuple(self._parts.unpack(codec.read_event(body), read) for _, body in rows)
            self._knows_all_parts = True
            return Loaded(checkpoint, events, after + len(rows))

    def _registering(self, read: ReadPart) -> ReadPart:
        """A reader that registers each part, so that all unfinished tasks share one object."""

        def register(digest: str) -> Value:
            value = read(digest)
            self._parts.add_stored(digest, value, self._sequence)
            return value

        return register

    def save(self, checkpoint: Checkpoint, finished: Sequence[Task]) -> None:
        if not self._checkpointed <= checkpoint.sequence <= self._sequence:
            bounds = f"{self._checkpointed} and {self._sequence}"
            raise ValueError(f"the checkpoint is at event {checkpoint.sequence}, not between {bounds}")
        used: dict[str, SharedValue] = {}
        with self._database.writing("store a checkpoint in") as connection:
            for task in finished:
                _archive(connection, task, self._parts.pack(task, used), checkpoint.sequence)
            self._write_live(connection, checkpoint.tasks, used)
            _store_parts(connection, used.values())
            connection.execute(
                "DELETE FROM events WHERE sequence <= ? AND (task IS NULL OR task NOT IN (SELECT id FROM live))",
                (checkpoint.sequence,),
            )
            connection.execute(
                "INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?)",
                (
                    checkpoint.sequence,
                    codec.write(msgspec.structs.replace(checkpoint, tasks=())),
                    msgspec.json.encode([task.id for task in checkpoint.tasks]).decode(),
                ),
            )
        for part in used.values():
            part.stored = True
        self._parts.keep_only(checkpoint.tasks, checkpoint.sequence)
        self._written = {task.id: task for task in checkpoint.tasks}
        self._checkpointed = checkpoint.sequence

    def in_place(self) -> bool:
        return self._database.in_place()

    def shared(self, spec: TaskSpec) -> TaskSpec:
        return self._parts.shared(spec)

    def new_task_ids(self, count: int) -> TaskId:
        """Ids are reserved in blocks, so that most calls do not wait for the disk.

        A killed daemon leaves a gap; a clean end returns the rest of its block.
        """
        if count < 1:
            raise ValueError(f"{count} ids were asked for; at least one must be")
        with self._ids:
            if self._next_id + count > self._reserved_to:
                self._reserve(max(count, ID_BLOCK))
            first, self._next_id = self._next_id, self._next_id + count
            return TaskId(first)

    def close(self) -> None:
        with self._ids, suppress(StoreError):  # closed before, or a full disk: a gap is harmless
            if self._next_id < self._reserved_to:
                with self._database.writing("store the next task id in", relaxed=True) as connection:
                    connection.execute("UPDATE meta SET value = ? WHERE name = 'next_task_id'", (self._next_id,))
                self._reserved_to = self._next_id
        self._database.close()
        self._record.close()

    def _reserve(self, count: int) -> None:
        """Reserves a block of ids without an fsync: the append that uses an id makes both durable, and an id that was
        lost with its append was never acknowledged. There is one writer, so the rest of the previous block continues in
        this one."""
        with self._database.writing("reserve task ids in", relaxed=True) as connection:
            row = connection.execute(
                "UPDATE meta SET value = value + ? WHERE name = 'next_task_id' RETURNING value", (count,)
            ).fetchall()[0]
        if not self._reserved_to:
            self._next_id = row[0] - count
        self._reserved_to = row[0]

    def _read_checkpoint(self, connection: sqlite3.Connection, read: ReadPart) -> Checkpoint | None:
        row = connection.execute("SELECT body, task_order FROM checkpoint").fetchone()
        if row is None:
            return None
        bodies = dict(connection.execute("SELECT id, body FROM live").fetchall())
        order = msgspec.json.decode(row[1], type=list[int])
        if bodies.keys() != set(order):
            raise damaged(self.path, "load", "tasks of the checkpoint are missing")
        tasks = tuple(self._parts.unpack(codec.read_task(bodies[task]), read) for task in order)
        return msgspec.structs.replace(codec.read_checkpoint(row[0]), tasks=tasks)

    def _write_live(self, connection: sqlite3.Connection, tasks: Iterable[Task], used: dict[str, SharedValue]) -> None:
        """Values are frozen, so that an unchanged object needs no write: waiting tasks are written once."""
        now = {task.id: task for task in tasks}
        changed = [task for task in now.values() if self._written.get(task.id) is not task]
        if self._written:
            gone = [(task,) for task in self._written if task not in now]
            connection.executemany("DELETE FROM live WHERE id = ?", gone)
        else:
            connection.execute("DELETE FROM live")
        rows = [(task.id, codec.write(self._parts.pack(task, used))) for task in changed]
        connection.executemany("INSERT OR REPLACE INTO live VALUES (?, ?)", rows)


def _store_parts(connection: sqlite3.Connection, parts: Iterable[SharedValue]) -> None:
    rows = [(part.digest, codec.write(part.value)) for part in parts if not part.stored]
    connection.executemany("INSERT OR IGNORE INTO parts VALUES (?, ?)", rows)


def _archive(connection: sqlite3.Connection, task: Task, packed: Task, sequence: int) -> None:
    """Move a task, and its events up to the checkpoint, to the archive; appends to an earlier story."""
    if not isinstance(task.status, Finished):
        raise ValueError(f"task {task.id} goes to the archive but has not finished")
    earlier = connection.execute("SELECT story FROM finished WHERE id = ?", (task.id,)).fetchone()
    rows = connection.execute(
        "DELETE FROM events WHERE task = ? AND sequence <= ? RETURNING sequence, body", (task.id, sequence)
    ).fetchall()
    bodies = [body for _, body in sorted(rows)]
    if earlier and earlier[0] != "[]":
        bodies.insert(0, earlier[0][1:-1])  # a JSON list without its brackets
    environment, command = reference(packed.spec.environment), reference(packed.spec.command)
    kind, story = tag_of(task.status.outcome), f"[{','.join(bodies)}]"
    row = (task.id, task.owner.uid, task.status.at, kind, 0, environment, command, codec.write(packed), story)
    connection.execute("INSERT OR REPLACE INTO finished VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
