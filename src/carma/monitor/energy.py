"""A card's energy counter, asked for now and then, and carried forward by its power in between.

On an H200 (driver 580) this one call takes 4.8 ms of CPU time, four times as much as all others of a sample. Asked
once a second on eight GPUs it alone would keep 4 % of a core busy. A counter that stood still in between would charge
half a minute's energy to whoever runs when it moves; power is cheap to read, and the counter corrects the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carma.monitor.gpu_faults import Nvml, ask

HOLD_S = 30.0
_NOT_GIVEN = (1 << 64) - 1


class EnergyCounter:
    """The counter in joules. It never goes back, unless the driver's own counter starts again."""

    def __init__(self, nvml: Nvml, handle: Any, monotonic: Callable[[], float]) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._counted_at: float | None = None  # when the driver's counter was read
        self._counted_j = 0.0
        self._shown_at = 0.0
        self._shown_j = 0.0

    def read(self, power_w: float | None) -> float | None:
        """None while the counter does not answer; it is then asked again at the next sample."""
        now = self._monotonic()
        if self._counted_at is not None and now - self._counted_at < HOLD_S:
            self._shown_j += (power_w or 0.0) * (now - self._shown_at)
            self._shown_at = now
            return self._shown_j
        millijoules = ask(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle)
        if millijoules is None or millijoules == _NOT_GIVEN:
            self._counted_at = None
            return None
        return self._correct(millijoules / 1000.0, now)

    def _correct(self, counted_j: float, now: float) -> float:
        """Where power was overrated the sum waits until the counter has caught up."""
        restarted = counted_j < self._counted_j
        self._shown_j = counted_j if restarted else max(counted_j, self._shown_j)
        self._counted_j, self._counted_at, self._shown_at = counted_j, now, now
        return self._shown_j
