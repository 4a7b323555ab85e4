"""Measures one case in this process, a fork that was made before CUDA started: allocator peaks, footprint, history.

The process, its end and the allocator's counters are those of the data set (`gpumemnet/dataset/inside`), which must be
on the module path beside `carma/trial/inside`. Added here are the footprint's peak and the allocator's history.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import forks  # type: ignore[import-not-found]

POLL_S = 0.02


def answer(line: socket.socket, case: dict[str, Any], device: str, folder: Path) -> None:
    """All that a worker does. The history of the case becomes `folder`/PID.bin."""
    messages = line.makefile("r")

    def say(said: str, row: dict[str, Any] | None = None) -> None:
        line.sendall(json.dumps({"said": said, "row": row}).encode() + b"\n")

    say("ready")
    if messages.readline() != "go\n":
        return
    try:
        is_gpu = device.startswith("cuda")
        row = on_gpu(case, folder / f"{os.getpid()}.bin") if is_gpu else attempt([*case["argv"], "--device", device])
    except Exception as error:  # of the measuring, not of the case
        row = failure(error) | {"unmeasured": True}
    say("row", row)
    messages.readline()


def attempt(argv: list[str]) -> dict[str, Any]:
    """The case's own program, to its end or to its error."""
    began = time.monotonic()
    try:
        importlib.import_module("case").main(argv)
        found: dict[str, Any] = {"error": None}
    except BaseException as error:
        found = failure(error)
    return found | {"run_s": round(time.monotonic() - began, 2)}


def failure(error: BaseException) -> dict[str, Any]:
    found = dict(forks.failure(error))
    return found | {"error": found["error"] or "out of memory"}


def on_gpu(case: dict[str, Any], history: Path) -> dict[str, Any]:
    import torch
    import training_run  # type: ignore[import-not-found]

    meter = training_run.Meter()
    meter.start("cuda")
    footprint = FootprintPeak(training_run.gpu_counters())
    context = footprint.read()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    steps = StepCounter()
    with footprint:
        row = attempt(case["argv"])
    with contextlib.suppress(Exception):  # after a failed kernel every call raises; the case's own error stays
        row |= {**meter.figures(), **figures(footprint), "context": context, "steps": steps.count}
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        history.write_bytes(importlib.import_module("history").pack(case["id"], entries))
        row["events"] = len(entries)
    return row


def figures(footprint: FootprintPeak) -> dict[str, Any]:
    """Figures in bytes. `outside` is the footprint beyond the allocator's memory at the end: context and libraries."""
    import torch

    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    at_end, reserved = footprint.read(), torch.cuda.memory_reserved()
    return {
        "active_peak": stats.get("active_bytes.all.peak"),
        "footprint_peak": footprint.peak or None,
        "footprint_end": at_end,
        "reserved_end": reserved,
        "outside": None if at_end is None else at_end - reserved,
        "segments": stats.get("segment.all.peak"),
    }


class FootprintPeak:
    """The largest footprint of this process; while entered, a thread reads it every POLL_S if there is NVML."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def read(self) -> int | None:
        used: int | None = self.gpu.own_bytes()[0]
        self.peak = max(self.peak, used or 0)
        return used

    def _watch(self) -> None:
        while self.gpu.nvml is not None and not self._over.wait(POLL_S):
            self.read()


class StepCounter:
    """Counts optimizer steps from outside the case's program."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1
