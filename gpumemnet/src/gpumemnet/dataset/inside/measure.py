"""One config measured in this process: a fork of the collector, made before CUDA started.

The context is made and measured first, with one tiny tensor that is given back before the model is built, so that the
run finds the allocator untouched. Then the process waits until the collector has room for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import subprocess
import sys
import time
import traceback
from typing import Any, Protocol

import loop
import torch

ERROR_CHARS = 400
TRIES = 3  # to read footprints
# What libraries say, besides torch's own error, when memory was short.
OOM_SIGNS = ("out of memory", "outofmemory", "alloc_failed", "memory_allocation", "memoryallocation")
# Errors that may come of a card that is short of memory: worth another run, alone.
CARD_SIGNS = ("cuda", "cudnn", "cublas", "unable to find an engine")


class Meter(Protocol):
    """What a run takes of the device. Figures are bytes, None where there are none."""

    def start(self) -> None: ...

    def figures(self) -> dict[str, Any]: ...

    def segments(self) -> int:
        """How often the driver was asked for memory so far."""

    def sync(self) -> None: ...

    def give_back(self) -> None:
        """What the allocator holds and no tensor needs."""


class CpuMeter:
    def start(self) -> None:
        return

    def figures(self) -> dict[str, Any]:
        return {**dict.fromkeys(("allocated_peak", "reserved_peak", "requested_peak")), "retries": 0}

    def segments(self) -> int:
        return 0

    def sync(self) -> None:
        return

    def give_back(self) -> None:
        return


class CudaMeter:
    """torch's own counters. The footprint is not asked here: NVML makes all who start wait, so the parent asks it."""

    def start(self) -> None:
        torch.cuda.init()
        tiny = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        del tiny
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()

    def figures(self) -> dict[str, Any]:
        stats = torch.cuda.memory_stats()
        return {
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "requested_peak": stats.get("requested_bytes.all.peak"),
            "retries": stats.get("num_alloc_retries", 0),
        }

    def segments(self) -> int:
        return int(torch.cuda.memory_stats().get("segment.all.allocated", 0))

    def sync(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        torch.cuda.empty_cache()


class Footprints:
    """What processes hold on a card, by NVML; by nvidia-smi where Python has no NVML binding."""

    def __init__(self, uuid: str | None) -> None:
        self.nvml: Any = None
        self.uuid = uuid
        if uuid is not None:
            with contextlib.suppress(Exception):  # no binding, or one that finds no driver
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self.card = nvml.nvmlDeviceGetHandleByUUID(uuid)
                self.nvml = nvml

    def read(self) -> dict[int, int]:
        """Bytes by process."""
        if self.uuid is None:
            return {}
        if self.nvml is None:
            lines = ask_smi("--query-compute-apps=pid,used_gpu_memory").splitlines()
            pairs = (line.partition(",")[::2] for line in lines)
            return {int(pid): int(mib) << 20 for pid, mib in pairs if mib.strip().isdigit()}
        for _ in range(TRIES):  # it fails now and then while processes come and go; without a figure a run is lost
            with contextlib.suppress(self.nvml.NVMLError):
                running = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.card)
                return {each.pid: int(each.usedGpuMemory) for each in running if each.usedGpuMemory is not None}
        return {}


def make_meter(device: str) -> Meter:
    return CudaMeter() if device.startswith("cuda") else CpuMeter()


def open_nvml() -> tuple[Any, Any]:
    """The binding and this process's card, by its UUID where torch tells it: indices differ under a mask."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no binding, or one that finds no driver
        return None, None
    with contextlib.suppress(Exception):
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return nvml, nvml.nvmlDeviceGetHandleByIndex(0)


def ask_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def describe(device: str) -> dict[str, Any]:
    """The card, its driver, and what is free on it; asked in a fork, because asking starts CUDA."""
    if not device.startswith("cuda"):
        return {"gpu": None}
    card = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info()
    nvml, handle = open_nvml()
    driver = nvml.nvmlSystemGetDriverVersion() if nvml else ask_smi("--query-gpu=driver_version").strip()
    return {
        "gpu": card.name,
        "uuid": nvml.nvmlDeviceGetUUID(handle) if nvml else f"GPU-{card.uuid}",
        "gpu_bytes": card.total_memory,
        "free_bytes": free,
        "capability": f"{card.major}.{card.minor}",
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "cudnn": torch.backends.cudnn.version(),
        "footprint_by": "nvml" if nvml else "nvidia-smi",
    }


class Measurement:
    """A config's run in this process, step by step: `start`, `train`, and for activity the training goes on."""

    def __init__(self, config: dict[str, Any], device: str, steps: int, numbers: Any) -> None:
        self.config, self.device, self.steps, self.numbers = config, device, steps, numbers
        self.meter: Meter | None = None
        self.made: Any = None
        self.training: Any = None

    def start(self) -> dict[str, Any] | None:
        """None; or the row, where there is nothing to train on."""
        try:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.made = loop.Made(self.config, self.numbers)  # now: others wait for nothing of it, and no room is held
            self.meter = make_meter(self.device)
            self.meter.start()
        except Exception as error:
            return {"steps": 0, "finite": None, **failure(error)}
        return None

    def train(self) -> dict[str, Any]:
        assert self.meter is not None
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
        with contextlib.suppress(Exception):  # after a failed kernel every call raises; the run's own error is kept
            row |= self.meter.figures()
        row["again"] = bool(row.get("again") or row.get("retries"))
        return row

    def rest(self) -> None:
        """Keeps what lasts from step to step; what a step takes for a moment is others' meanwhile."""
        assert self.meter is not None
        self.meter.sync()
        self.meter.give_back()

    def release(self) -> None:
        """Memory that is given back goes faster than memory that a dying process leaves behind."""
        self.training = self.made = None
        gc.collect()  # torch's first optimizer of a process stays in a circle of references
        if self.meter is not None:
            with contextlib.suppress(Exception):  # after a failed kernel every call raises
                self.meter.give_back()


def failure(error: BaseException) -> dict[str, Any]:
    """`again`: it may be the others' doing, where there are others."""
    text = f"{type(error).__name__}: {error}".strip()
    low = text.lower()
    oom = any(sign in low for sign in OOM_SIGNS)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}]" if frames else ""
    return {
        "oom": oom,
        "error": None if oom else " ".join(text.split())[:ERROR_CHARS] + place,
        "again": oom or any(sign in low for sign in CARD_SIGNS),
    }


def hush() -> None:
    """What the libraries print is nobody's."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
