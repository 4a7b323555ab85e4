"""What the card shows over a span: activity between two snapshots of GPM, power from the energy counter, clocks.

The daemon's own sampler (monitor/) does this for good; here nothing but the standard library and NVML's binding may be
needed, and pipes are read that nothing is decided by (fp32). Everything is None where the driver does not give it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# NVML's metric of each figure; "graphics" is its word for the engine that runs kernels too.
METRICS = {
    "gr_active": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "fp32_active": "NVML_GPM_METRIC_FP32_UTIL",
}
MIB = 1 << 20


class Mark(NamedTuple):
    """One end of a span."""

    at: float  # monotonic
    snapshot: Any
    energy_mj: int | None


class Meter:
    """The first card. Without NVML it answers None to everything, and `why` says what is missing."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.why = ""
        self._monotonic = monotonic
        self._nvml: Any = None
        self._card: Any = None
        self._snapshots: list[Any] = []
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._card = nvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = nvml
        except Exception as error:  # no binding, no library, no driver, no card: all the same here
            self.why = f"no NVML: {error}"
            return
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._card).isSupportedDevice:
                raise RuntimeError("this card has none")
            self._snapshots = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        except Exception as error:
            self.why = f"no GPM: {error}"

    def mark(self, end: bool = False) -> Mark:
        """One end of a span; there are two places for snapshots, so one span at a time."""
        snapshot = None
        with contextlib.suppress(Exception):
            snapshot = self._snapshots[int(end)]
            self._nvml.nvmlGpmSampleGet(self._card, snapshot)
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return Mark(self._monotonic(), snapshot, energy_mj)

    def between(self, first: Mark, last: Mark) -> dict[str, float | None]:
        """Shares of the span, and watts. Snapshots closer together than 100 ms would read 0: not compared."""
        seconds = last.at - first.at
        shares: dict[str, float | None] = dict.fromkeys(METRICS)
        if first.snapshot is not None and last.snapshot is not None and seconds > 0.1:
            with contextlib.suppress(Exception):
                shares = self._shares(first.snapshot, last.snapshot)
        power_w = None
        if first.energy_mj is not None and last.energy_mj is not None and seconds > 0.1:
            power_w = (last.energy_mj - first.energy_mj) / 1000.0 / seconds
        return {**shares, "power_w": power_w}

    def _shares(self, first: Any, last: Any) -> dict[str, float | None]:
        question = self._nvml.c_nvmlGpmMetricsGet_t()
        question.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)
        question.sample1, question.sample2 = first, last
        for place, metric in enumerate(METRICS.values()):
            question.metrics[place].metricId = getattr(self._nvml, metric)
        answer = self._nvml.nvmlGpmMetricsGet(question)
        return {name: _share(answer.metrics[place]) for place, name in enumerate(METRICS)}

    def used_mib(self) -> int | None:
        """Of the whole card."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return None if memory is None else int(memory.used) // MIB

    def own_mib(self) -> int | None:
        """Of this process; where process ids differ (a container), of the only process that there is."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
        mine = [each for each in processes if each.pid == os.getpid()] or (processes if len(processes) == 1 else [])
        return None if not mine or mine[0].usedGpuMemory is None else int(mine[0].usedGpuMemory) // MIB

    def clocks_mhz(self) -> dict[str, int | None]:
        kinds = {"sm_mhz": "NVML_CLOCK_SM", "memory_mhz": "NVML_CLOCK_MEM"}
        return {
            name: self._ask("nvmlDeviceGetClockInfo", getattr(self._nvml, kind, None)) for name, kind in kinds.items()
        }

    def power_now_w(self) -> float | None:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000.0

    def about(self) -> dict[str, Any]:
        limit_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = getattr(self._nvml, "NVML_CLOCK_SM", None)
        return {
            "gpu": _text(self._ask("nvmlDeviceGetName")),
            "driver": None if self._nvml is None else _text(self._nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": None if limit_mw is None else limit_mw / 1000.0,
            "most_sm_mhz": self._ask("nvmlDeviceGetMaxClockInfo", clock),
            "missing": self.why or None,
        }

    def _ask(self, function: str, *more: Any) -> Any:
        if self._nvml is None:
            return None
        with contextlib.suppress(Exception):
            return getattr(self._nvml, function)(self._card, *more)
        return None


def _share(metric: Any) -> float | None:
    value = float(metric.value)
    if metric.nvmlReturn != 0 or not math.isfinite(value) or not 0.0 <= value <= 110.0:
        return None
    return min(1.0, value / 100.0)


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else None if value is None else str(value)
