"""A substitute for SM activity: the sum of NVML's SM utilisation of the processes. Maxwell and newer, without DCGM.

It shows whether kernels of some process ran, and approximately for which share of the time. It does not show how many
SMs those kernels kept busy: a process with one small kernel always running shows 100 %. So the sum is nearer to the
coarse utilisation than to SM activity, and too high. If processes share the card it can also be too low: on an H200
(driver 580) only one of two time-sliced processes is listed, and under MPS only the server. It therefore describes the
GPU as a whole, never one process, and is used only if neither GPM nor DCGM answers and activity cannot be inferred
from power and utilisation (core/telemetry/inferred_activity.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities
from carma.monitor.gpu_faults import Nvml, ask, offers

FUNCTION = "nvmlDeviceGetProcessUtilization"
QUIET_S = 2.5  # the driver adds entries up to once a second: after this time without one no process ran a kernel


def is_offered(nvml: Nvml, handle: Any) -> bool:
    """False on MIG instances, and if the driver denies it to this user."""
    return offers(nvml, FUNCTION, handle, 0)


class UtilisationReader:
    """One GPU. Only entries newer than the last one are requested, so that none counts twice."""

    capabilities = Capabilities(metrics=("sm_active",), source="processes")

    def __init__(self, nvml: Nvml, handle: Any, monotonic: Callable[[], float]) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._newest_us = 0
        self._received_at = monotonic()
        self._last = NO_ACTIVITY
        self.read()  # entries from before the start are no reading
        self._last = NO_ACTIVITY

    def read(self) -> Activity:
        """NO_ACTIVITY if the counter does not answer; the last figure again while the driver has no newer entries."""
        answer = ask(self._nvml, FUNCTION, self._handle, self._newest_us, nothing=())
        if answer is None:
            return NO_ACTIVITY
        entries = [entry for entry in answer if entry.timeStamp > self._newest_us]  # some drivers repeat the last one
        now = self._monotonic()
        if entries:
            self._newest_us = max(entry.timeStamp for entry in entries)
            self._received_at = now
            self._last = Activity(sm_active=_sum(entries))
        elif now - self._received_at >= QUIET_S:
            self._last = Activity(sm_active=0.0)
        return self._last

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def _sum(entries: list[Any]) -> float | None:
    """The sum of each process's mean over its entries. Figures above 100 mean that the driver has none."""
    of_process: dict[int, list[float]] = {}
    for entry in entries:
        if entry.smUtil <= 100:
            of_process.setdefault(entry.pid, []).append(entry.smUtil / 100.0)
    if not of_process:
        return None
    return min(1.0, sum(sum(shares) / len(shares) for shares in of_process.values()))
