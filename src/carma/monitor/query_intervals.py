"""Queries to a driver that are not made at every sample: retries, cached answers, and the energy counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from carma.monitor.gpu_faults import NOT_GIVEN_64, Nvml, ask

ENERGY_S = 30.0  # interval of reading the energy counter
T = TypeVar("T")


class BackOff:
    """The time of the next try: after `first_s`, then after twice the previous wait, up to `limit_s`."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s, self._limit_s = first_s, limit_s
        self.reset()

    def reset(self) -> None:
        self._wait_s = self._first_s
        self._due_at: float | None = None

    def due(self, now: float) -> bool:
        """The first call starts the wait. True once at its end, when the next wait starts."""
        if self._due_at is None:
            self._due_at = now + self._wait_s
            return False
        if now < self._due_at:
            return False
        self._wait_s = min(2 * self._wait_s, self._limit_s)
        self._due_at = now + self._wait_s
        return True


class Cached(Generic[T]):
    """An answer that is used for `valid_s`; 0: never. A query that raises is repeated at the next call."""

    def __init__(self, query: Callable[[], T], valid_s: float, monotonic: Callable[[], float]) -> None:
        self._query, self._valid_s, self._monotonic = query, valid_s, monotonic
        self._answer: tuple[float, T] | None = None  # time, answer

    def get(self) -> T:
        now = self._monotonic()
        if self._answer is None or now - self._answer[0] >= self._valid_s:
            self._answer = (now, self._query())
        return self._answer[1]


class EnergyCounter:
    """A card's energy counter in joules, read every ENERGY_S and extended by its power in between. It never decreases,
    unless the driver's own counter starts again.

    On an H200 (driver 580) this one call takes 4.8 ms of processor time, four times as much as all others of a sample.
    Once a second on eight GPUs it alone would keep 4 % of a core busy. A counter that stood still in between would
    charge the energy of half a minute to the task that runs when it moves. Power is cheap to read, and the counter
    corrects the sum.
    """

    def __init__(self, nvml: Nvml, handle: Any, monotonic: Callable[[], float]) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._counted_at: float | None = None  # when the driver's counter was read
        self._counted_j = 0.0
        self._shown_at = 0.0
        self._shown_j = 0.0

    def read(self, power_w: float | None) -> float | None:
        """None while the counter does not answer; it is read again at the next sample."""
        now = self._monotonic()
        if self._counted_at is not None and now - self._counted_at < ENERGY_S:
            self._shown_j += (power_w or 0.0) * (now - self._shown_at)
            self._shown_at = now
            return self._shown_j
        millijoules = ask(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle)
        if millijoules is None or millijoules == NOT_GIVEN_64:
            self._counted_at = None
            return None
        counted_j = millijoules / 1000.0
        restarted = counted_j < self._counted_j
        # After an overestimate by power the sum waits until the counter has caught up.
        self._shown_j = counted_j if restarted else max(counted_j, self._shown_j)
        self._counted_j, self._counted_at, self._shown_at = counted_j, now, now
        return self._shown_j
