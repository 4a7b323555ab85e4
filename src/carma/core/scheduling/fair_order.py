"""The order of the queue with fair shares (fairness.enabled): a queue per rank, with the tasks of each user by age.

1. An earlier rank goes first: innocent victims of an out-of-memory failure, then priority.
2. Within a rank, the user with the lowest level goes first (fairness.py).
3. A pass adds what a considered task asks for to its user's level, as if it had started; so the tasks of users with
   equal levels alternate.

For long queues, users are kept sorted, and a pass merges only the users that it reaches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from copy import deepcopy
from heapq import heappop, heappush, heapreplace

from carma.core.model.values import TaskId

QueueKey = tuple[int, int, TaskId]  # the order of the queue: see `state.queue_key`
Rank = tuple[int, int]  # the beginning of a queue key
UserPlace = tuple[float, TaskId, int]  # a user's level, first task and uid


class RankQueue:
    """The queued tasks of one rank."""

    __slots__ = ("places", "tasks", "users")

    def __init__(self) -> None:
        self.tasks: dict[int, list[TaskId]] = {}  # by user, sorted by age
        self.users: list[UserPlace] = []  # sorted
        self.places: dict[int, UserPlace] = {}  # the same by user

    def put(self, uid: int, level: float) -> None:
        """The user's place, after a change of the level or of the first task."""
        before, tasks = self.places.pop(uid, None), self.tasks[uid]
        if before is not None:
            del self.users[bisect_left(self.users, before)]
        if not tasks:
            del self.tasks[uid]
            return
        self.places[uid] = place = (level, tasks[0], uid)
        insort(self.users, place)


class FairQueue:
    def __init__(self) -> None:
        self.by_rank: dict[Rank, RankQueue] = {}

    def add(self, key: QueueKey, uid: int, level: float) -> None:
        queue = self.by_rank.setdefault(key[:2], RankQueue())
        tasks = queue.tasks.setdefault(uid, [])
        insort(tasks, key[2])
        if tasks[0] == key[2]:
            queue.put(uid, level)

    def remove(self, key: QueueKey, uid: int) -> None:
        queue = self.by_rank[key[:2]]
        tasks = queue.tasks[uid]
        place = bisect_left(tasks, key[2])
        del tasks[place]
        if place == 0:
            queue.put(uid, queue.places[uid][0])
        if not queue.tasks:
            del self.by_rank[key[:2]]

    def set_level(self, uid: int, level: float) -> None:
        for queue in self.by_rank.values():
            if uid in queue.places and queue.places[uid][0] != level:
                queue.put(uid, level)

    def users(self) -> set[int]:
        return {uid for queue in self.by_rank.values() for uid in queue.tasks}

    def with_one_more(self, key: QueueKey, uid: int, level: float) -> FairQueue:
        """A copy with a task that is not in the queue yet."""
        larger = deepcopy(self)
        larger.add(key, uid, level)
        return larger


class FairOrder:
    """The queue in the order of one pass. `cost` is what a task would add to its user's level."""

    def __init__(self, queue: FairQueue, cost: Callable[[TaskId], float]) -> None:
        self._queue = queue
        self._cost = cost
        self._free = False
        self._left_out: set[int] = set()
        self._spent: dict[int, float] = {}  # in this pass, by user

    def passed_over(self) -> None:
        """The current task may not start: it costs its user nothing."""
        self._free = True

    def leave_out(self, uid: int) -> None:
        """Skip the user's other tasks."""
        self._left_out.add(uid)

    def __iter__(self) -> Iterator[QueueKey]:
        for rank in sorted(self._queue.by_rank):
            yield from self._of_rank(rank, self._queue.by_rank[rank])

    def _of_rank(self, rank: Rank, queue: RankQueue) -> Iterator[QueueKey]:
        users, spent, reached = queue.users, self._spent, 0
        next_up: list[tuple[float, TaskId, int, int]] = []  # a heap of the reached users, each at a place
        while next_up or reached < len(users):
            while reached < len(users) and (not next_up or users[reached][:2] <= next_up[0][:2]):
                level, first, uid = users[reached]
                heappush(next_up, (level + spent.get(uid, 0.0), first, uid, 0))
                reached += 1
            level, task, uid, place = next_up[0]
            if uid in self._left_out:
                heappop(next_up)
                continue
            self._free = False
            yield (*rank, task)
            cost = 0.0 if self._free else self._cost(task)
            if cost:
                spent[uid] = spent.get(uid, 0.0) + cost
            tasks = queue.tasks[uid]
            if place + 1 < len(tasks):
                heapreplace(next_up, (level + cost, tasks[place + 1], uid, place + 1))
            else:
                heappop(next_up)
