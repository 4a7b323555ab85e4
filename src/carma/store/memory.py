"""A store without a file, for tests, the simulator and estimates without a daemon; passes the same contract suite."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from carma.command_pattern import pattern
from carma.core.model.events import Durable, TaskRestored, UseNoted, task_of
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, GpuId, GpuUsage, TaskId, TaskSpec
from carma.core.ports import Checkpoint, HistoryQuery, Loaded, PastRun, TaskPage, end_of
from carma.core.telemetry.usage import add_up
from carma.errors import StoreError
from carma.store.archive import HOUR_S, RUNS_KEPT
from carma.store.codec import write_event

Place = tuple[int, str, tuple[str, ...]]  # uid, directory, command without its numbers


class MemoryStore:
    """Implements core.ports.Store and Archive. Its contents survive `close`; `reopen` simulates a
    restart."""

    def __init__(self) -> None:
        self._open = True
        self._events: list[Durable] = []  # after the checkpoint
        self._checkpoint: Checkpoint | None = None
        self._sequence = 0
        self._stories: dict[TaskId, list[Durable]] = {}
        self._finished: dict[TaskId, Task] = {}
        self._restored: set[TaskId] = set()
        self._runs: dict[Place, dict[AttemptKey, PastRun]] = {}
        self._usage: dict[tuple[int, GpuId], GpuUsage] = {}
        self._next = 1

    def append(self, events: Sequence[Durable]) -> int:
        self._must_be_open()
        for event in events:
            write_event(event)  # refuses what a file cannot hold
        for event in events:
            self._events.append(event)
            task = task_of(event)
            if task is not None:
                self._stories.setdefault(task, []).append(event)
            if isinstance(event, TaskRestored):
                self._restored.add(event.task.id)
            if isinstance(event, UseNoted):
                self._add_usage(event.gpus)
        self._sequence += len(events)
        return self._sequence

    def load(self) -> Loaded:
        self._must_be_open()
        return Loaded(self._checkpoint, tuple(self._events), self._sequence)

    def save(self, checkpoint: Checkpoint, finished: Sequence[Task]) -> None:
        self._must_be_open()
        before = self._checkpoint.sequence if self._checkpoint else 0
        if not before <= checkpoint.sequence <= self._sequence:
            raise ValueError(
                f"the checkpoint is at event {checkpoint.sequence}, not between {before} and {self._sequence}"
            )
        for task in finished:
            if not isinstance(task.status, Finished):
                raise ValueError(f"task {task.id} goes to the archive but has not finished")
        for task in finished:
            self._finished[task.id] = task
            self._restored.discard(task.id)
        del self._events[: checkpoint.sequence - before]
        self._checkpoint = checkpoint

    def in_place(self) -> bool:
        return True

    def shared(self, spec: TaskSpec) -> TaskSpec:
        return spec

    def new_task_ids(self, count: int) -> TaskId:
        self._must_be_open()
        if count < 1:
            raise ValueError(f"{count} ids were asked for; at least one must be")
        first = TaskId(self._next)
        self._next += count
        return first

    def close(self) -> None:
        self._open = False

    def reopen(self) -> None:
        self._open = True

    def task(self, task: TaskId) -> Task | None:
        self._must_be_open()
        return None if task in self._restored else self._finished.get(task)

    def tasks(self, ids: Collection[TaskId]) -> Sequence[Task]:
        return [_listed(task) for task_id in ids if (task := self.task(task_id)) is not None]

    def page(self, query: HistoryQuery = HistoryQuery()) -> TaskPage:
        self._must_be_open()
        archived = [task for task in self._finished.values() if task.id not in self._restored and query.has(task)]
        found = sorted(archived, key=end_of, reverse=True)
        listed = [_listed(task) for task in found[: max(0, query.limit)]]
        return TaskPage(listed, more=len(found) > len(listed) > 0)

    def story(self, task: TaskId) -> Sequence[Durable]:
        self._must_be_open()
        return list(self._stories.get(task, ()))

    def remember(self, run: PastRun) -> None:
        self._must_be_open()
        near = self._runs.setdefault((run.uid, run.directory, pattern(run.command)), {})
        near.setdefault(run.key, run)
        same = self.past_runs(uid=run.uid, command=run.command, directory=run.directory, limit=len(near))
        for old in same[RUNS_KEPT:]:
            del near[old.key]

    def _add_usage(self, rows: Sequence[GpuUsage]) -> None:
        for row in rows:
            place = (row.hour, row.gpu)
            known = self._usage.get(place)
            self._usage[place] = row if known is None else add_up(known, row)

    def usage(self, *, since: float, until: float) -> Sequence[GpuUsage]:
        self._must_be_open()
        return [row for (hour, _), row in sorted(self._usage.items()) if since <= hour * HOUR_S < until]

    def past_runs(
        self, *, uid: int, command: tuple[str, ...], directory: str, near: bool = False, limit: int = 20
    ) -> Sequence[PastRun]:
        self._must_be_open()
        runs = self._runs.get((uid, directory, pattern(command)), {}).values()
        wanted = [run for run in runs if near or run.command == command]
        wanted.sort(key=lambda run: (run.ended_at, run.key.task, run.key.attempt), reverse=True)
        return wanted[: max(0, limit)]

    def _must_be_open(self) -> None:
        if not self._open:
            raise StoreError("the store in memory has been closed", "Open it again before it is used.")


def _listed(task: Task) -> Task:
    return replace(task, spec=replace(task.spec, environment={}))
