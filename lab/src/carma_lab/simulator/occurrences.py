"""What is in the heap of a simulation: all that happens by itself at a time that is known."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from carma.core.model.outcome import Outcome
from carma.core.model.values import AttemptKey, Record, TaskId
from carma_lab.simulator.simulated_server import Runner

T = TypeVar("T")


class Heap(Generic[T]):
    __slots__ = ("_entries", "_pushed")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, T]] = []
        self._pushed = 0

    def push(self, at: float, what: T) -> None:
        heappush(self._entries, (at, self._pushed, what))
        self._pushed += 1

    def pop(self) -> tuple[float, T]:
        at, _, what = heappop(self._entries)
        return at, what

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> float | None:
        return self._entries[0][0] if self._entries else None


class Arrival(Record, frozen=True):
    place: int  # in the trace


class Started(Record, frozen=True):
    key: AttemptKey


class Begun(Record, frozen=True):
    """Its first use of the GPU."""

    key: AttemptKey


class Saved(Record, frozen=True):
    """One that was asked to save has done so, and leaves."""

    key: AttemptKey


class Thought(Record, frozen=True):
    """The end of an estimate that took its time."""

    task: TaskId


class Look(Record, frozen=True):
    pass


class Wake(Record, frozen=True):
    pass


class Ending(Record, frozen=True):
    """What became of an attempt. It is told with all that was seen of it, once all that was seen is told."""

    key: AttemptKey
    outcome: Outcome


Happening = Arrival | Started | Begun | Saved | Thought | Look | Wake | tuple[Runner, int]
