"""Answers that are good for a while. Every question to the driver costs processor time, and some change slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Asks at most once in `hold_s`; 0 asks every time. A question that raises is asked again at the next call."""

    def __init__(self, question: Callable[[], T], hold_s: float, monotonic: Callable[[], float]) -> None:
        self._question, self._hold_s, self._monotonic = question, hold_s, monotonic
        self._answer: tuple[float, T] | None = None  # when, what

    def get(self) -> T:
        now = self._monotonic()
        if self._answer is None or now - self._answer[0] >= self._hold_s:
            self._answer = (now, self._question())
        return self._answer[1]
