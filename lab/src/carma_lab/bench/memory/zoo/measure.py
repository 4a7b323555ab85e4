"""One case measured in this process: the peaks that torch counts, what NVML says of the process, the history.

It runs in a fork made before CUDA started. The context is measured first, with one tiny tensor that is given back
before the case begins, so that the case finds the allocator untouched.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import threading
import time
import traceback
from pathlib import Path
from typing import Any

POLL_S = 0.02
ERROR_CHARS = 600


def describe(device: str) -> dict[str, Any]:
    import torch

    if not device.startswith("cuda"):
        return {"gpu": None}
    card = torch.cuda.get_device_properties(0)
    return {
        "gpu": card.name,
        "gpu_bytes": card.total_memory,
        "capability": f"{card.major}.{card.minor}",
        "cudnn": torch.backends.cudnn.version(),
        "driver": Meter().driver(),
        "footprint_by": Meter().source,
    }


class Meter:
    """The footprint of this process, by NVML; by nvidia-smi where Python has no NVML binding."""

    def __init__(self) -> None:
        self.nvml: Any = None
        with contextlib.suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self.handle = nvml.nvmlDeviceGetHandleByIndex(0)
            self.nvml = nvml
        self.source = "nvml" if self.nvml else "nvidia-smi"
        self.peak = 0
        self.over = threading.Event()

    def driver(self) -> str:
        if self.nvml:
            version = self.nvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        return _smi("--query-gpu=driver_version").strip()

    def read(self) -> int | None:
        used: int | None = None
        if self.nvml:
            for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    used = int(process.usedGpuMemory)
        else:
            for line in _smi("--query-compute-apps=pid,used_gpu_memory").splitlines():
                pid, _, mib = line.partition(",")
                if pid.strip() == str(os.getpid()) and mib.strip().isdigit():
                    used = int(mib) << 20
        self.peak = max(self.peak, used or 0)
        return used

    def watch(self) -> None:
        while self.nvml and not self.over.wait(POLL_S):
            with contextlib.suppress(Exception):  # one reading missed is no reason to lose the case
                self.read()


def run(case: dict[str, Any], device: str, answer: Path) -> None:
    """Runs the case and leaves `answer`.json, and `answer`.bin with its history."""
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        row = on_gpu(case, answer) if device.startswith("cuda") else attempt([*case["argv"], "--device", device])
    except Exception as error:  # of the measuring, not of the case: a row all the same
        row = failure(error) | {"unmeasured": True}
    scratch = answer.with_suffix(".part")
    scratch.write_text(json.dumps(row))
    scratch.replace(answer.with_suffix(".json"))


def attempt(argv: list[str]) -> dict[str, Any]:
    """The case's own program, to its end or to its error."""
    began = time.monotonic()
    try:
        importlib.import_module("case").main(argv)
        return {"error": None, "run_s": round(time.monotonic() - began, 2)}
    except BaseException as error:
        return failure(error) | {"run_s": round(time.monotonic() - began, 2)}


def failure(error: BaseException) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    place = traceback.format_tb(error.__traceback__)[-1].strip().splitlines()[0]
    return {"error": f"{text} [{place}]", "oom": "outofmemory" in text.lower() or "out of memory" in text.lower()}


def on_gpu(case: dict[str, Any], answer: Path) -> dict[str, Any]:
    import torch

    meter = Meter()
    torch.cuda.init()
    tiny = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    context = meter.read()
    context = None if context is None else context - torch.cuda.memory_reserved()
    del tiny
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    watcher = threading.Thread(target=meter.watch, daemon=True)
    watcher.start()
    steps = Steps()
    row = attempt(case["argv"])
    meter.over.set()
    watcher.join()
    with contextlib.suppress(Exception):  # after a failed kernel every call raises; the case's own error is kept
        row |= figures(meter, context) | {"steps": steps.seen}
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        answer.with_suffix(".bin").write_bytes(importlib.import_module("history").pack(case["id"], entries))
        row["events"] = len(entries)
    return row


def figures(meter: Meter, context: int | None) -> dict[str, Any]:
    """All in bytes. `outside` is what the footprint holds beyond the allocator at the end: context and libraries."""
    import torch

    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    at_end, reserved = meter.read(), torch.cuda.memory_reserved()
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
        "requested_peak": stats.get("requested_bytes.all.peak"),
        "active_peak": stats.get("active_bytes.all.peak"),
        "footprint_peak": meter.peak or None,
        "footprint_end": at_end,
        "reserved_end": reserved,
        "outside": None if at_end is None else at_end - reserved,
        "context": context,
        "retries": stats.get("num_alloc_retries", 0),
        "segments": stats.get("segment.all.peak"),
    }


class Steps:
    """Counts optimizer steps from outside the case's program."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.seen = 0
        register_optimizer_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.seen += 1


def _smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
