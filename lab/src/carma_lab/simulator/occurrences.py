"""Entries of a simulation's heap: everything that happens at a known time, in the order of time."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from carma.core.model.outcome import Outcome
from carma.core.model.values import AttemptKey, Record, TaskId
from carma_lab.simulator.simulated_server import RunningTask

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


class FirstUse(Record, frozen=True):
    """The first use of the GPU by an attempt."""

    key: AttemptKey


class Saved(Record, frozen=True):
    """A preempted attempt has saved, and leaves."""

    key: AttemptKey


class EstimateReady(Record, frozen=True):
    """An estimate that took some time is ready."""

    task: TaskId


class SampleDue(Record, frozen=True):
    pass


class Wake(Record, frozen=True):
    pass


class Ending(Record, frozen=True):
    """The outcome of an attempt. It is passed to the core after the samples taken so far."""

    key: AttemptKey
    outcome: Outcome


Occurrence = Arrival | Started | FirstUse | Saved | EstimateReady | SampleDue | Wake | tuple[RunningTask, int]
