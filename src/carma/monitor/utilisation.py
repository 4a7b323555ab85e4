"""A stand-in for SM activity: the sum of NVML's SM utilisation of the processes. Maxwell and newer, no DCGM needed.

What it tells: whether kernels of some process ran, and roughly for which share of the time. What it cannot tell: how
many SMs those kernels kept busy. A process with one small kernel always running shows 100 % here, so the sum is nearer
to the coarse utilisation than to SM activity, and errs on the busy side. Where processes share the card it also errs
the other way: on an H200 (driver 580) one of two time-sliced processes is named, and under MPS only the server. So it
stands for the GPU as a whole, never for one process, and is used only where neither GPM nor DCGM answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities
from carma.monitor.gpu_faults import Nvml, ask, offers

FUNCTION = "nvmlDeviceGetProcessUtilization"
# The driver makes entries up to once a second. No entry for longer than this means that nobody ran a kernel.
QUIET_S = 2.5


def is_offered(nvml: Nvml, handle: Any) -> bool:
    """Not on MIG instances, and not where the driver keeps it from this user."""
    return offers(nvml, FUNCTION, handle, 0)


class UtilisationReader:
    """One GPU. Entries are asked for since the newest one seen, so that none counts twice."""

    capabilities = Capabilities(metrics=("sm_active",), source="processes")

    def __init__(self, nvml: Nvml, handle: Any, monotonic: Callable[[], float]) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._seen_us = 0
        self._heard_at = monotonic()
        self._last = NO_ACTIVITY
        self.read()  # what the driver kept from before the start is no reading
        self._last = NO_ACTIVITY

    def read(self) -> Activity:
        """None where the counter does not answer; the last figure again while the driver has no newer entries."""
        entries = self._entries()
        if entries is None:
            return NO_ACTIVITY
        now = self._monotonic()
        if entries:
            self._seen_us = max(entry.timeStamp for entry in entries)
            self._heard_at = now
            self._last = Activity(sm_active=_sum(entries))
        elif now - self._heard_at >= QUIET_S:
            self._last = Activity(sm_active=0.0)
        return self._last

    def close(self) -> None:
        """Nothing is held."""

    def _entries(self) -> list[Any] | None:
        """Those that are newer than all before: some drivers repeat the last one. None: the counter does not answer."""
        answer = ask(self._nvml, FUNCTION, self._handle, self._seen_us, nothing=())
        return None if answer is None else [entry for entry in answer if entry.timeStamp > self._seen_us]


def _sum(entries: Iterable[Any]) -> float | None:
    """Each process's mean over its entries, added up. Figures above 100 are the driver's way to say nothing."""
    of_process: dict[int, list[float]] = {}
    for entry in entries:
        if entry.smUtil <= 100:
            of_process.setdefault(entry.pid, []).append(entry.smUtil / 100.0)
    if not of_process:
        return None
    return min(1.0, sum(sum(shares) / len(shares) for shares in of_process.values()))
