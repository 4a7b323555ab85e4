"""What a training run makes the GPU do while it is alone there: step time, GPM metrics, power.

GPM gives averages of the whole GPU between two snapshots, so nothing else may run in between. Mean power comes from the
driver's energy counter. The mean of instantaneous readings is recorded too, because that counter moves in small jumps.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import Any

import training_run  # type: ignore[import-not-found]
from carma_measure.gpu_counters import GPM_METRICS  # type: ignore[import-not-found]

WARM_S = 0.06  # of training before the window: clocks rise, and what other runs did is over
MIN_STEPS = 2  # long steps are much alike
MAX_WINDOW_S = 8.0
POLL_S = 0.025
FIGURES = ("step_ms", "window_s", "window_steps", *GPM_METRICS, "power_w", "power_polled_w")


def no_activity() -> dict[str, Any]:
    return dict.fromkeys(FIGURES)


class Probe:
    """The GPU between `begin` and `end`. Figures that the driver does not provide are None."""

    def __init__(self, device: str) -> None:
        self.gpu: Any = training_run.gpu_counters() if device.startswith("cuda") else None
        if self.gpu is not None:
            self.gpu.open_gpm()
        self.first: Any = None
        self.watts: list[float] = []
        self.over = threading.Event()
        self.poller = threading.Thread(target=self._poll, daemon=True)

    def begin(self) -> None:
        self.poller.start()
        if self.gpu is not None:
            self.first = self.gpu.mark()

    def end(self) -> dict[str, Any]:
        found = {} if self.gpu is None else self.gpu.between(self.first, self.gpu.mark(end=True))
        self.over.set()
        self.poller.join()
        power_w = found.pop("power_w", None)
        return {
            "power_w": None if power_w is None else round(power_w, 1),
            "power_polled_w": round(statistics.fmean(self.watts), 1) if self.watts else None,
            **{name: None if value is None else round(value, 4) for name, value in found.items()},
        }

    def _poll(self) -> None:
        while self.gpu is not None and self.gpu.nvml is not None and not self.over.wait(POLL_S):
            with contextlib.suppress(Exception):
                (field,) = self.gpu.ask("nvmlDeviceGetFieldValues", [self.gpu.nvml.NVML_FI_DEV_POWER_INSTANT])
                if field.nvmlReturn == 0:
                    self.watts.append(field.value.uiVal / 1000)
                    continue
            return  # this driver does not provide it


def measure(run: Any, probe: Probe, window_s: float) -> dict[str, Any]:
    """Trains for `window_s` and returns FIGURES. The run must be alone on the GPU."""
    step, sync = run.training.step, run.meter.sync
    warm_up(step, run.meter.segments)
    sync()
    probe.begin()
    began = time.monotonic()
    times = repeat(step, window_s, MIN_STEPS)
    sync()
    took_s = time.monotonic() - began
    return {
        **no_activity(),
        "step_ms": round(statistics.median(times) * 1000, 4),
        "window_s": round(took_s, 3),
        "window_steps": len(times),
        **probe.end(),
    }


def warm_up(step: Any, segments: Any) -> None:
    """Trains until a step allocates no segment: a run that rested has to allocate again what it released."""
    began = time.monotonic()
    before = None
    while before != (now := segments()) or time.monotonic() - began < WARM_S:
        if time.monotonic() - began > MAX_WINDOW_S:
            return
        before = now
        step()


def repeat(step: Any, min_s: float, min_steps: int) -> list[float]:
    """Seconds of each step, until both minimums are reached; ends soon after MAX_WINDOW_S."""
    began = last = time.monotonic()
    times: list[float] = []
    while (last - began < min_s or len(times) < min_steps) and last - began < MAX_WINDOW_S:
        step()
        now = time.monotonic()
        times.append(now - last)
        last = now
    return times
