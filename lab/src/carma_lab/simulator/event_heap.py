"""What is to come, in the order of time; what was pushed first comes first among equals, so that a run repeats."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

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
