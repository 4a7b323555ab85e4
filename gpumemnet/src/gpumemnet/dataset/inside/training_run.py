"""Trains one config in this process, a fork of the collector that was made before CUDA started.

The CUDA context is created first, with one small tensor that is freed before the model is built, so that the allocator
is untouched. Then the process waits until the collector has memory for it. The footprint is not read here: NVML delays
processes that are starting, so the parent reads it for all of them at once.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from typing import Any

import loop
import torch
from carma_measure.gpu_counters import GpuCounters  # type: ignore[import-not-found]
from forks import failure  # type: ignore[import-not-found]


class Meter:
    """The counters of torch's allocator, in bytes. They are empty until CUDA is started, and on a CPU it never is."""

    def start(self, device: str) -> None:
        """Creates the context."""
        if device.startswith("cuda"):
            torch.cuda.init()
            tiny = torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            del tiny
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()

    def figures(self) -> dict[str, Any]:
        stats = torch.cuda.memory_stats()
        peaks = {f"{name}_peak": stats.get(f"{name}_bytes.all.peak") for name in ("allocated", "reserved", "requested")}
        return {**peaks, "retries": stats.get("num_alloc_retries", 0)}

    def segments(self) -> int:
        """How many segments the driver has allocated so far."""
        return int(torch.cuda.memory_stats().get("segment.all.allocated", 0))

    def sync(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def gpu_counters() -> Any:
    """NVML's view of torch's GPU, by UUID if torch knows it: indices differ if CUDA_VISIBLE_DEVICES is set."""
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    found = GpuCounters(f"GPU-{uuid}" if uuid else None)
    return found if found.nvml is not None or not uuid else GpuCounters()


def describe(device: str) -> dict[str, Any]:
    """The GPU, its driver and its free memory. It starts CUDA, so call it in a fork."""
    if not device.startswith("cuda"):
        return {"gpu": None}
    properties, counters = torch.cuda.get_device_properties(0), gpu_counters()
    free, _ = torch.cuda.mem_get_info()
    return {
        "gpu": properties.name,
        "uuid": counters.ask("nvmlDeviceGetUUID") or f"GPU-{properties.uuid}",
        "gpu_bytes": properties.total_memory,
        "free_bytes": free,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": counters.driver_version(),
        "cudnn": torch.backends.cudnn.version(),
        "footprint_by": counters.source,
    }


class TrainingRun:
    """The run of one config, step by step: `start`, `train`; to measure activity, training goes on after that."""

    def __init__(self, config: dict[str, Any], device: str, steps: int, numbers: Any) -> None:
        self.config, self.device, self.steps, self.numbers = config, device, steps, numbers
        self.meter = Meter()
        self.made: Any = None
        self.training: Any = None

    def start(self) -> dict[str, Any] | None:
        """None, or the row if there is nothing to train on."""
        try:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.made = loop.make(self.config, self.numbers)  # before GPU memory is reserved for this run
            self.meter.start(self.device)
        except Exception as error:
            return {"steps": 0, "finite": None, **failure(error)}
        return None

    def train(self) -> dict[str, Any]:
        row: dict[str, Any] = {"steps": 0, "finite": None, "error": None, "oom": False}
        try:
            began_s = time.monotonic()
            self.training = loop.Training(self.config, self.device, self.numbers, self.made)
            row["made_s"] = round(time.monotonic() - began_s, 3)
            row["parameters"] = sum(each.numel() for each in self.training.model.parameters())
            for _ in range(self.steps):
                finite = math.isfinite(self.training.step())
                self.meter.sync()
                row |= {"steps": row["steps"] + 1, "finite": finite and row["finite"] is not False}
            row["stepped"] = self.training.stepped
            row["trained_s"] = round(time.monotonic() - began_s - row["made_s"], 3)
        except Exception as error:
            row |= failure(error)
        with contextlib.suppress(Exception):  # after a failed kernel every call raises; the run's own error stays
            row |= self.meter.figures()
        row["again"] = bool(row.get("again") or row.get("retries"))
        return row

    def rest(self) -> None:
        """Keeps what lasts from step to step. Others may use the memory that only a step needs."""
        self.meter.sync()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Memory that a process frees is available sooner than memory that a dying process leaves behind."""
        self.training = self.made = None
        gc.collect()  # torch's first optimizer of a process stays in a circle of references
        with contextlib.suppress(Exception):  # after a failed kernel every call raises
            torch.cuda.empty_cache()
