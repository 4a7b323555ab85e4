"""Reads one GPU by NVML, or by nvidia-smi where Python has no binding: memory, activity, energy and power.

Every measuring program uses it, and the daemon's sampler takes the comparison of GPM snapshots from it. It must run in
any interpreter: the standard library only, Python 3.9 or newer. A figure that the driver does not provide is None.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SMI_TIMEOUT_S = 20
ATTEMPTS = 3  # the list of processes fails now and then while processes start and end
MIN_SPACING_S = 0.1  # between two snapshots; an H200 with driver 580 reads 0 without an error for closer ones
# NVML's metric for each figure. "Graphics" is NVML's word for the engine, which also runs kernels. Engine activity is
# last, because it takes most time and the daemon leaves it out of most requests.
GPM_METRICS = {
    "sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "gr_active": "NVML_GPM_METRIC_GRAPHICS_UTIL",
}


def fraction(metric: Any) -> float | None:
    """A GPM metric, which is a percentage with its own error code. Rounding may lead slightly above 100."""
    value = float(metric.value)
    if metric.nvmlReturn != 0 or not math.isfinite(value) or not 0.0 <= value <= 110.0:
        return None
    return min(1.0, value / 100.0)


class GpmRequest:
    """A request for the averages between two GPM snapshots. NVML's structure has 19 KB and is filled in once."""

    def __init__(self, nvml: Any, metrics: Mapping[str, str] = GPM_METRICS) -> None:
        self.names = tuple(metrics)
        self._structure = nvml.c_nvmlGpmMetricsGet_t()
        self._structure.version = nvml.NVML_GPM_METRICS_GET_VERSION
        for place, metric in enumerate(metrics.values()):
            self._structure.metrics[place].metricId = getattr(nvml, metric)

    def fractions(
        self, call: Callable[[Any], Any], first: Any, last: Any, count: int | None = None
    ) -> dict[str, float | None] | None:
        """`call` is nvmlGpmMetricsGet; None if it returns None. Only the first ``count`` metrics are computed."""
        request = self._structure
        request.sample1, request.sample2 = first, last
        request.numMetrics = len(self.names) if count is None else count
        answer = call(request)
        if answer is None:
            return None
        return {name: fraction(answer.metrics[place]) for place, name in enumerate(self.names)}


class Mark(NamedTuple):
    """One end of a span."""

    at: float  # monotonic
    snapshot: Any
    energy_mj: int | None


class GpuCounters:
    """The GPU with that UUID, else the first one. Without NVML, ``why`` says what is missing."""

    def __init__(
        self,
        uuid: str | None = None,
        metrics: Mapping[str, str] = GPM_METRICS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.why = ""
        self.nvml: Any = None
        self._uuid, self._metrics, self._monotonic = uuid, metrics, monotonic
        self._snapshots: list[Any] = []
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            by_uuid = uuid is not None
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(0)
            self.nvml = nvml
        except Exception as error:  # no binding, no library, no driver or no GPU
            self.why = f"no NVML: {error}"

    @property
    def source(self) -> str:
        """Source of the memory figures."""
        return "nvml" if self.nvml is not None else "nvidia-smi"

    def ask(self, function: str, *arguments: Any) -> Any:
        """An NVML function of this GPU; None if it fails."""
        with contextlib.suppress(Exception):
            return getattr(self.nvml, function)(self._handle, *arguments)
        return None

    def smi(self, query: str) -> list[list[str]]:
        """The cells that nvidia-smi prints for a query; none if nvidia-smi is missing."""
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", self._uuid or "0"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]

    def driver_version(self) -> str | None:
        """The version of the driver."""
        if self.nvml is None:
            cells = self.smi("--query-gpu=driver_version")
            return cells[0][0] if cells else None
        version = self.nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def used_bytes(self) -> int | None:
        """Used memory of the whole GPU."""
        if self.nvml is not None:
            memory = self.ask("nvmlDeviceGetMemoryInfo")
            return None if memory is None else int(memory.used)
        cells = self.smi("--query-gpu=memory.used")
        return int(cells[0][0]) << 20 if cells and cells[0][0].isdigit() else None

    def process_bytes(self) -> dict[int, int]:
        """Footprint of each process on the GPU."""
        if self.nvml is None:
            rows = self.smi("--query-compute-apps=pid,used_gpu_memory")
            return {int(row[0]): int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].isdigit()}
        for _ in range(ATTEMPTS):
            running = self.ask("nvmlDeviceGetComputeRunningProcesses")
            if running is not None:
                return {each.pid: int(each.usedGpuMemory) for each in running if each.usedGpuMemory is not None}
        return {}

    def own_bytes(self) -> tuple[int | None, str]:
        """Footprint of this process, and how it was found: in a container, whose process ids differ, the only listed
        process is this one."""
        found = self.process_bytes()
        if os.getpid() in found:
            return found[os.getpid()], "process"
        return (next(iter(found.values())), "only_process") if len(found) == 1 else (None, "")

    def open_gpm(self) -> None:
        """Allocates two snapshots; without GPM, ``why`` says so."""
        try:
            if not self.nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                raise RuntimeError("this GPU does not have it")
            self._snapshots = [self.nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        except Exception as error:
            self.why = self.why or f"no GPM: {error}"

    def mark(self, end: bool = False) -> Mark:
        """Begins or ends a span; there are two snapshots, so spans must not overlap."""
        snapshot = None
        if self._snapshots:
            with contextlib.suppress(Exception):
                self.nvml.nvmlGpmSampleGet(self._handle, self._snapshots[int(end)])
                snapshot = self._snapshots[int(end)]
        return Mark(self._monotonic(), snapshot, self.ask("nvmlDeviceGetTotalEnergyConsumption"))

    def between(self, first: Mark, last: Mark) -> dict[str, float | None]:
        """Mean activity of the span, and ``power_w`` from the energy counter."""
        seconds = last.at - first.at
        found: dict[str, float | None] | None = None
        if first.snapshot is not None and last.snapshot is not None and seconds > MIN_SPACING_S:
            with contextlib.suppress(Exception):
                request = GpmRequest(self.nvml, self._metrics)
                found = request.fractions(self.nvml.nvmlGpmMetricsGet, first.snapshot, last.snapshot)
        power_w = None
        if first.energy_mj is not None and last.energy_mj is not None and seconds > MIN_SPACING_S:
            power_w = (last.energy_mj - first.energy_mj) / 1000.0 / seconds
        return {**(found or dict.fromkeys(self._metrics)), "power_w": power_w}
