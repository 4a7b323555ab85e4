"""When to try again. Something that is away is asked for less and less often."""

from __future__ import annotations


class BackOff:
    """When the next try is due: after `first_s`, then each time twice as long, up to `limit_s`."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s, self._limit_s = first_s, limit_s
        self.reset()

    def reset(self) -> None:
        self._wait_s = self._first_s
        self._due_at: float | None = None

    def due(self, now: float) -> bool:
        """Starts waiting at the first call; true once when the wait is over, and the next wait begins."""
        if self._due_at is None:
            self._due_at = now + self._wait_s
            return False
        if now < self._due_at:
            return False
        self._wait_s = min(2 * self._wait_s, self._limit_s)
        self._due_at = now + self._wait_s
        return True
