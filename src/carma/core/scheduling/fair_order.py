"""The line with users taking turns (fairness.enabled): a lane for each rank of tasks, in it a line for each user.

Whoever stands in an earlier rank goes first, as ever: innocent victims of an OOM, then priority. Within one, the user's
turn comes whose level is lowest (fairness.py), and what their task asks for is added to it before the next is looked
for, as if it had started; so tasks of users on one level alternate. Users' own tasks go in the order of their age.

Made for long lines: users are kept sorted, and a walk merges only as many of them as it gets to.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace

from carma.core.model.values import TaskId

Turn = tuple[int, int, TaskId]  # the order of the queue: see `state.turn`
Rank = tuple[int, int]  # as a Turn begins
Place = tuple[float, TaskId, int]  # a user's level, their first task, the user


class Lane:
    """Of one rank."""

    __slots__ = ("lines", "places", "users")

    def __init__(self) -> None:
        self.lines: dict[int, list[TaskId]] = {}  # by user, by age
        self.users: list[Place] = []  # sorted
        self.places: dict[int, Place] = {}  # the same by user

    def put(self, uid: int, level: float) -> None:
        """The user's place, after a change of the level or of the first task."""
        before, line = self.places.pop(uid, None), self.lines[uid]
        if before is not None:
            del self.users[bisect_left(self.users, before)]
        if not line:
            del self.lines[uid]
            return
        self.places[uid] = place = (level, line[0], uid)
        insort(self.users, place)

    def with_one_more(self, uid: int, level: float, task: TaskId) -> Lane:
        """A copy in which that one stands last in its user's line."""
        lane = Lane()
        lane.lines = {**self.lines, uid: [*self.lines.get(uid, ()), task]}
        lane.users, lane.places = self.users.copy(), self.places.copy()
        lane.put(uid, level)
        return lane


class Lanes:
    def __init__(self) -> None:
        self.by_rank: dict[Rank, Lane] = {}

    def join(self, turn: Turn, uid: int, level: float) -> None:
        lane = self.by_rank.setdefault(turn[:2], Lane())
        line = lane.lines.setdefault(uid, [])
        insort(line, turn[2])
        if line[0] == turn[2]:
            lane.put(uid, level)

    def leave(self, turn: Turn, uid: int) -> None:
        lane = self.by_rank[turn[:2]]
        line = lane.lines[uid]
        where = bisect_left(line, turn[2])
        del line[where]
        if where == 0:
            lane.put(uid, lane.places[uid][0])
        if not lane.lines:
            del self.by_rank[turn[:2]]

    def moved(self, uid: int, level: float) -> None:
        """The user's level has changed."""
        for lane in self.by_rank.values():
            if uid in lane.places and lane.places[uid][0] != level:
                lane.put(uid, level)

    def users(self) -> set[int]:
        return {uid for lane in self.by_rank.values() for uid in lane.lines}

    def with_one_more(self, turn: Turn, uid: int, level: float) -> Lanes:
        """A copy with a task that is not in the line yet: its user's last."""
        lanes = Lanes()
        lanes.by_rank = dict(self.by_rank)
        lanes.by_rank[turn[:2]] = self.by_rank.get(turn[:2], Lane()).with_one_more(uid, level, turn[2])
        return lanes


class InTurn:
    """One way along all lanes. `cost` says what a task would add to its user's level."""

    def __init__(self, lanes: Lanes, cost: Callable[[TaskId], float]) -> None:
        self._lanes = lanes
        self._cost = cost
        self._free = False
        self._left_out: set[int] = set()
        self._spent: dict[int, float] = {}  # on this way, by user

    def passed_over(self) -> None:
        """The last one's turn cannot come now: it costs its user nothing."""
        self._free = True

    def leave_out(self, uid: int) -> None:
        """The user's other tasks do not come up any more."""
        self._left_out.add(uid)

    def __iter__(self) -> Iterator[Turn]:
        for rank in sorted(self._lanes.by_rank):
            yield from self._along(rank, self._lanes.by_rank[rank])

    def _along(self, rank: Rank, lane: Lane) -> Iterator[Turn]:
        users, spent, here = lane.users, self._spent, 0
        next_up: list[tuple[float, TaskId, int, int]] = []  # a heap of users that were reached: with a place in theirs
        while next_up or here < len(users):
            while here < len(users) and (not next_up or users[here][:2] <= next_up[0][:2]):
                level, first, uid = users[here]
                heappush(next_up, (level + spent.get(uid, 0.0), first, uid, 0))
                here += 1
            level, task, uid, place = next_up[0]
            if uid in self._left_out:
                heappop(next_up)
                continue
            self._free = False
            yield (*rank, task)
            cost = 0.0 if self._free else self._cost(task)
            if cost:
                spent[uid] = spent.get(uid, 0.0) + cost
            line = lane.lines[uid]
            if place + 1 < len(line):
                heapreplace(next_up, (level + cost, line[place + 1], uid, place + 1))
            else:
                heappop(next_up)
