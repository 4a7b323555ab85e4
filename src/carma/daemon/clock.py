"""The daemon's clock: epoch seconds that never go back, whatever the machine's clock does.

It reads the wall once, at start, and follows the monotonic clock from there, so a clock that is set back (or
forward) while the daemon runs moves nothing. `speed` makes time pass faster for demonstrations on virtual GPUs.
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
        """`not_before` is the time of the last stored event: a restart with an older wall clock goes on from there."""
        self.speed = speed
        self._steady = steady
        self._origin_s = steady()
        self._start_at = max(wall(), not_before)

    def now(self) -> float:
        return self._start_at + (self._steady() - self._origin_s) * self.speed

    def real_s(self, until: float) -> float:
        """How many real seconds remain until `until`; 0 when it has passed."""
        return max(0.0, (until - self.now()) / self.speed)
