"""What has changed since `propose` last looked, so that it need not look at everything each time. Seen, not logged.

Nothing is decided here: an entry says "look at this one", and whoever finds that nothing is due strikes it out. An
entry too many costs a look, one too few would be a defect. tests/plainly.py looks at everything, and tests compare.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush
from typing import TypeVar

from carma.core.model.status import Running
from carma.core.model.task import Task
from carma.core.model.values import GpuId, GpuSample, TaskId
from carma.core.telemetry.measurements import Live

EARLY_S = 0.001  # a time that is due may be computed in two ways that differ in their last bits

Name = TypeVar("Name")


class News:
    __slots__ = ("_limit_at", "_limits", "_shown", "ended", "grown", "ripe", "settled", "watched")

    def __init__(self) -> None:
        self.watched: set[GpuId] = set()  # the watchdog is to look at those
        self.grown: set[TaskId] = set()  # active tasks: there may be memory to store
        self.settled: set[TaskId] = set()  # active tasks: their bookings may shrink
        self.ended: set[TaskId] = set()  # finished tasks on which others wait
        self.ripe: set[TaskId] = set()  # running tasks whose time limit, or the warning before it, is due or nearly so
        self._limits: list[tuple[float, TaskId]] = []  # a heap of what will be ripe, and when
        self._limit_at: dict[TaskId, float] = {}  # the entry of the heap that counts
        self._shown: dict[TaskId, set[GpuId]] = {}  # task -> GPUs whose last look shows processes of it

    def active(self, task: Task) -> None:
        """A task that starts or runs is another one than before."""
        self.grown.add(task.id)
        self.settled.add(task.id)
        self._limit(task)

    # -- time limits ----------------------------------------------------------------------------------------------
    def _limit(self, task: Task) -> None:
        """When somebody should look at its time limit."""
        at = due_at(task)
        if at is None:
            self._limit_at.pop(task.id, None)
        elif self._limit_at.get(task.id) != at:
            self._limit_at[task.id] = at
            heappush(self._limits, (at - EARLY_S, task.id))

    def ripen(self, now: float) -> set[TaskId]:
        while self._limits and self._limits[0][0] <= now:
            at, task_id = heappop(self._limits)
            counts = self._limit_at.get(task_id)
            if counts is not None and counts - EARLY_S == at:
                del self._limit_at[task_id]
                self.ripe.add(task_id)
        return self.ripe

    def not_ripe(self, task: Task | None, task_id: TaskId, now: float) -> None:
        """Nothing was due. It stays if that is a matter of the last bits only."""
        at = None if task is None else due_at(task)
        if task is None or at is None or at - EARLY_S > now:
            self.ripe.discard(task_id)
            if task is not None:
                self._limit(task)

    # -- what a look at a GPU shows ---------------------------------------------------------------------------------
    def looked(self, live: Live, look: GpuSample) -> None:
        """The GPU's newest look at memory. What it shows of a task depends on whether that has ended meanwhile."""
        before, live.look = live.look, look
        if before is not None and before.processes is look.processes:
            return
        tasks = [use.attempt.task for use in look.processes or () if use.attempt is not None]
        if tasks == live.shown:
            return
        for task_id in live.shown:
            found = self._shown.get(task_id)
            if found is not None:
                found.discard(look.gpu)
                if not found:
                    del self._shown[task_id]
        for task_id in tasks:
            self._shown.setdefault(task_id, set()).add(look.gpu)
        live.shown = tasks

    def shown_on(self, task_id: TaskId) -> Collection[GpuId]:
        return self._shown.get(task_id, ())


def due_at(task: Task) -> float | None:
    """When the next thing about its time limit is due; None: never."""
    status, limit_s = task.status, task.spec.time_limit_s
    if limit_s is None or not isinstance(status, Running) or status.ending is not None:
        return None
    warn = task.spec.warn
    before_s = warn.before_s if warn is not None and not status.warned else 0.0
    return status.since + limit_s - max(0.0, before_s)


def in_order(names: set[Name], order: Collection[Name]) -> list[Name]:
    """Those of the names that `order` has, as they come there: what is due at the same time is told in its order."""
    if len(names) < 2:
        return [name for name in names if name in order]
    return list(filter(names.__contains__, order))
