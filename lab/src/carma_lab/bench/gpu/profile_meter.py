"""What a GPU does during a span: GPM activity with FP32, power from the energy counter, clocks, memory.

Only NVML's Python binding and the standard library are needed. A figure that the driver does not provide is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from carma.trial.inside.carma_measure.gpu_counters import GPM_METRICS, GpuCounters

METRICS = {**GPM_METRICS, "fp32_active": "NVML_GPM_METRIC_FP32_UTIL"}
MIB = 1 << 20


class Meter(GpuCounters):
    """The first GPU. Without NVML every figure is None, and `why` says what is missing."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(metrics=METRICS, monotonic=monotonic)
        self.open_gpm()

    def used_mib(self) -> int | None:
        """Used memory of the whole GPU."""
        used = self.used_bytes()
        return None if used is None else used // MIB

    def own_mib(self) -> int | None:
        """Footprint of this process."""
        own, _ = self.own_bytes()
        return None if own is None else own // MIB

    def clocks_mhz(self) -> dict[str, int | None]:
        kinds = {"sm_mhz": "NVML_CLOCK_SM", "memory_mhz": "NVML_CLOCK_MEM"}
        return {
            name: self.ask("nvmlDeviceGetClockInfo", getattr(self.nvml, kind, None)) for name, kind in kinds.items()
        }

    def about(self) -> dict[str, Any]:
        limit_mw = self.ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = getattr(self.nvml, "NVML_CLOCK_SM", None)
        name = self.ask("nvmlDeviceGetName")
        return {
            "gpu": name.decode() if isinstance(name, bytes) else name,
            "driver": self.driver_version(),
            "power_limit_w": None if limit_mw is None else limit_mw / 1000.0,
            "most_sm_mhz": self.ask("nvmlDeviceGetMaxClockInfo", clock),
            "missing": self.why or None,
        }
