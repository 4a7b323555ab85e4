"""What the scheduler keeps from one pass to the next: each GPU's door, what each waiting task asks for, and that nobody
could start. Seen, not logged, and never the last word: tests/plainly.py builds everything anew, and tests compare.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from math import inf

from msgspec.structs import replace

from carma.core.model.task import Task
from carma.core.model.values import Demand, Gpu, GpuId, TaskId
from carma.core.scheduling.decision import Ask
from carma.core.scheduling.reservation import Fence
from carma.core.scheduling.verdicts import Door

Turn = tuple[int, int, TaskId]
Shape = tuple[int, bool, float | None, Demand | None, int]  # memory, alone, run time alone, demand, GPUs

MOST_NUMBERS = 4096  # that are remembered


class Kept:
    """One GPU. `closed`, `free_mib` and `taken` say who may come in, and hold until `until` if nothing happens there.

    `door` says it in sentences, with all its figures as of `at`. Until `told_until` its sentences stay the same, and
    until `same_until` all of it, also when its holders should settle or end.
    """

    __slots__ = (
        "at",
        "closed",
        "door",
        "free_for",
        "free_mib",
        "gpu",
        "no_sooner",
        "place",
        "same_until",
        "taken",
        "told_until",
        "until",
        "until_one_ends",
        "version",
        "woken_at",
    )

    def __init__(self, gpu: Gpu, place: int) -> None:
        self.gpu = gpu
        self.place = place  # in index order
        self.closed = True  # to everybody
        self.free_mib = 0
        self.taken = False  # to those who want a GPU alone
        self.until = inf
        self.door: Door | None = None
        self.at = 0.0
        self.same_until = 0.0
        self.told_until = 0.0
        self.free_for: tuple[tuple[object, ...], float] | None = None  # who asked: not before then (reserve.free_at)
        self.until_one_ends = False  # nobody comes in before one of its tasks has left, as far as is known
        self.no_sooner: float | None = None  # than then it is free for anybody, where that is so (doors.py)
        self.version = 0  # of `Doors.version`, when it last changed
        self.woken_at = inf  # its earliest entry in `Doors.wakes`

    def hold(self, door: Door, now: float) -> None:
        self.closed = door.shut is not None or door.busy is not None
        self.free_mib, self.taken = door.free_mib, door.taken is not None
        self.door, self.at = door, now

    def lets_in(self, ask: Ask) -> bool:
        return not self.closed and ask.memory_mib <= self.free_mib and not (ask.alone and self.taken)


class Asked:
    """A waiting task, as the walk asks for it. `plain`: nothing but the GPUs decides when its turn comes. `number`:
    those who ask for the same have the same."""

    __slots__ = ("ask", "number", "plain", "runtime_s", "task")

    def __init__(self, task: Task, ask: Ask, runtime_s: float, plain: bool, number: int) -> None:
        self.task = task
        self.ask = ask
        self.runtime_s = runtime_s
        self.plain = plain
        self.number = number


class Nobody:
    """A pass in which nobody could start, and what would make another one worth while."""

    __slots__ = (
        "arrived", "as_of", "at", "behind", "fence", "fragile", "full", "last", "last_free", "smallest_mib", "until",
    )  # fmt: skip

    def __init__(self, at: float) -> None:
        self.at = at
        self.until = inf  # a time that the pass depended on
        self.last: Turn = (0, 0, TaskId(0))  # the line was looked at up to here
        self.full = False  # and those behind would not be looked at
        self.behind = -1  # how many were looked at, less the first of them, which the fence is for
        self.smallest_mib: float = inf  # the least that one of them asks for
        self.fragile = False  # a dependency, or an array's limit, kept one of them from its turn
        self.fence: Fence | None = None  # if it kept anybody out
        self.last_free: tuple[float, int] = (-inf, 0)  # of the fence's GPUs, the one that should be free last
        self.arrived: list[Turn] = []  # tasks behind `last` that came since
        # Where the policy has a say of its own: the version of the doors, and the time that it was told. Any change of
        # company may then let somebody in.
        self.as_of: tuple[int, float] | None = None


class Unopposed:
    """The GPUs that a policy has nothing against for some task, as they were at that version of the doors."""

    __slots__ = ("gpus", "version")

    def __init__(self) -> None:
        self.gpus: set[GpuId] = set()
        self.version = -1


def shape_of(ask: Ask) -> Shape:
    """All of an ask that a policy's objections, and room, depend on."""
    return (ask.memory_mib, ask.alone, ask.alone_s, ask.demand, ask.gpus)


class Doors:
    __slots__ = (
        "_numbered",
        "_numbers",
        "_unopposed",
        "_unopposed_at",
        "asked",
        "by_gpu",
        "drained",
        "found",
        "nobody",
        "now",
        "open",
        "touched",
        "version",
        "wakes",
    )

    def __init__(self) -> None:
        self.found: dict[GpuId, Gpu] = {}  # the very mapping that the state has
        self.drained: dict[str, str] = {}
        self.now = 0.0
        self.by_gpu: dict[GpuId, Kept] = {}  # in index order
        self.open: list[Kept] = []  # those that are not closed, in index order
        self.touched: set[GpuId] = set()  # something has changed there
        self.wakes: list[tuple[float, GpuId]] = []  # a heap: when doors must be looked at again
        self.asked: dict[TaskId, Asked] = {}
        self.nobody: Nobody | None = None
        self.version = 0  # counts changes of doors
        self._unopposed: dict[Shape, Unopposed] = {}
        self._unopposed_at = -inf
        self._numbers: dict[tuple[Ask, float], int] = {}
        self._numbered = 0

    def unopposed(self, at: float) -> dict[Shape, Unopposed]:
        """What the policy has nothing against, as of that time, by what is asked for."""
        if at != self._unopposed_at:
            self._unopposed, self._unopposed_at = {}, at
        return self._unopposed

    def number_of(self, ask: Ask, runtime_s: float) -> int:
        """A number for all that ask for the same."""
        key = (replace(ask, task=TaskId(0)), runtime_s)
        found = self._numbers.get(key)
        if found is None:
            if len(self._numbers) >= MOST_NUMBERS:
                self._numbers.clear()  # those that are known keep their numbers, and get no namesakes
            self._numbered += 1
            found = self._numbers[key] = self._numbered
        return found

    def begin(self, found: dict[GpuId, Gpu], drained: dict[str, str]) -> None:
        """Other GPUs, or other drains: nothing is known any more."""
        self.found, self.drained = found, dict(drained)
        ordered = sorted(found.values(), key=lambda gpu: gpu.index)
        self.by_gpu = {gpu.id: Kept(gpu, place) for place, gpu in enumerate(ordered)}
        self.open, self.wakes, self.nobody = [], [], None
        self._unopposed_at = -inf
        self.touched = set(self.by_gpu)
        self.asked.clear()

    def wake(self, kept: Kept) -> None:
        """See to it that it is looked at again at `until`."""
        if kept.until < kept.woken_at:
            kept.woken_at = kept.until
            heappush(self.wakes, (kept.until, kept.gpu.id))

    def awake(self, now: float) -> None:
        late: list[Kept] = []
        while self.wakes and self.wakes[0][0] <= now:
            at, gpu = heappop(self.wakes)
            kept = self.by_gpu[gpu]
            if kept.woken_at == at:
                kept.woken_at = inf
                late.append(kept)
        for kept in late:
            if kept.until <= now:
                self.touched.add(kept.gpu.id)
            else:
                self.wake(kept)

    def opened(self, kept: Kept) -> None:
        kept.closed = False
        insort(self.open, kept, key=lambda one: one.place)

    def shut(self, kept: Kept) -> None:
        kept.closed = True
        del self.open[bisect_left(self.open, kept.place, key=lambda one: one.place)]

    # -- what happens to tasks -------------------------------------------------------------------------------------
    def changed(self, task_id: TaskId) -> None:
        self.asked.pop(task_id, None)
        if self.nobody is not None and self.nobody.fragile:
            self.nobody = None

    def joined_line(self, turn: Turn) -> None:
        nobody = self.nobody
        if nobody is None:
            return
        if turn < nobody.last:
            self.nobody = None
        elif not nobody.full:
            nobody.arrived.append(turn)

    def left_line(self, turn: Turn) -> None:
        nobody = self.nobody
        if nobody is not None and (turn <= nobody.last or nobody.arrived or nobody.fence is not None):
            self.nobody = None
