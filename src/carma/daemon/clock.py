"""The daemon's clock: epoch seconds that never go back, whatever happens to the machine's clock.

It reads the wall clock once, at the start, and follows the monotonic clock from there. `speed` makes time pass faster
on virtual GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    def __init__(
        self,
        speed: float = 1.0,
        *,
        not_before: float = 0.0,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`not_before`: the time of the last stored event. After a restart with an older wall clock, time continues
        from there."""
        self.speed = speed
        self._steady = steady
        self._origin_s = steady()
        self._start_at = max(wall(), not_before)

    def now(self) -> float:
        return self._start_at + (self._steady() - self._origin_s) * self.speed
