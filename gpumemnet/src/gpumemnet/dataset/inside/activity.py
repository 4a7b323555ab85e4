"""What a training run makes the GPU do, alone on the card: step time, NVML's GPM metrics, power.

GPM gives averages between two snapshots of the whole card, so nothing else may run in the window. Power comes of the
driver's energy counter, and beside it the mean of readings of the moment: the counter moves in small jumps.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from typing import Any

import measure  # type: ignore[import-not-found]

WARM_S = 0.06  # before the window: clocks rise, and what others did is over
LEAST_STEPS = 2  # long ones are much alike
LONGEST_S = 8.0
POLL_S = 0.025
METRICS = {
    "sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "gr_active": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
}
FIGURES = ("step_ms", "window_s", "window_steps", *METRICS, "power_w", "power_polled_w")


def no_activity() -> dict[str, Any]:
    return dict.fromkeys(FIGURES)


class Probe:
    """The card between `begin` and `end`. What the driver does not give is None."""

    def __init__(self, device: str) -> None:
        self.nvml: Any = None
        self.card: Any = None
        if device.startswith("cuda"):
            self.nvml, self.card = measure.open_nvml()
        self.samples: list[Any] = []
        self.energy_mj: int | None = None
        self.watts: list[float] = []
        self.over = threading.Event()
        self.poller = threading.Thread(target=self._poll, daemon=True)
        self.began_s = 0.0
        if self.nvml is not None:
            with contextlib.suppress(Exception):
                self.samples = [self.nvml.nvmlGpmSampleAlloc() for _ in range(2)]

    def begin(self) -> None:
        self.poller.start()
        self._snap(0)
        self.energy_mj, self.began_s = self._energy_mj(), time.monotonic()

    def end(self) -> dict[str, Any]:
        energy_mj, took_s = self._energy_mj(), time.monotonic() - self.began_s
        self._snap(1)
        self.over.set()
        self.poller.join()
        used_mj = None if energy_mj is None or self.energy_mj is None else energy_mj - self.energy_mj
        return {
            "power_w": None if used_mj is None else round(used_mj / 1000 / took_s, 1),
            "power_polled_w": round(statistics.fmean(self.watts), 1) if self.watts else None,
            **self._shares(),
        }

    def _snap(self, place: int) -> None:
        if self.samples:
            try:
                self.nvml.nvmlGpmSampleGet(self.card, self.samples[place])
            except Exception:  # not offered by this card, or not allowed
                self.samples = []

    def _shares(self) -> dict[str, float | None]:
        if not self.samples:
            return dict.fromkeys(METRICS)
        question = self.nvml.c_nvmlGpmMetricsGet_t()
        question.version = self.nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)
        for place, name in enumerate(METRICS.values()):
            question.metrics[place].metricId = getattr(self.nvml, name)
        question.sample1, question.sample2 = self.samples
        try:
            answer = self.nvml.nvmlGpmMetricsGet(question)
        except Exception:
            return dict.fromkeys(METRICS)
        return {name: share(answer.metrics[place]) for place, name in enumerate(METRICS)}

    def _energy_mj(self) -> int | None:
        with contextlib.suppress(Exception):
            return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.card))
        return None

    def _poll(self) -> None:
        while self.nvml is not None and not self.over.wait(POLL_S):
            try:
                field = self.nvml.nvmlDeviceGetFieldValues(self.card, [self.nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            except Exception:
                return
            if field.nvmlReturn != 0:
                return
            self.watts.append(field.value.uiVal / 1000)


def share(metric: Any) -> float | None:
    """Percent to a share. Each metric has its own error number; rounding may lead a little above 100."""
    value = float(metric.value)
    if metric.nvmlReturn != 0 or not math.isfinite(value) or not 0.0 <= value <= 110.0:
        return None
    return round(min(1.0, value / 100.0), 4)


def watch(measurement: Any, probe: Probe, window_s: float) -> dict[str, Any]:
    """Trains for the window, and says what the card did. The run must be alone."""
    step, sync = measurement.training.step, measurement.meter.sync
    warm(step, measurement.meter.segments)
    sync()
    probe.begin()
    began = time.monotonic()
    times = repeat(step, window_s, LEAST_STEPS)
    sync()
    took_s = time.monotonic() - began
    figures = probe.end()
    return {
        **no_activity(),
        "step_ms": round(statistics.median(times) * 1000, 4),
        "window_s": round(took_s, 3),
        "window_steps": len(times),
        **figures,
    }


def warm(step: Any, segments: Any) -> None:
    """Until a step asks the driver for no memory: a run that rested has to get back what it gave."""
    began = time.monotonic()
    had = None
    while had != (has := segments()) or time.monotonic() - began < WARM_S:
        if time.monotonic() - began > LONGEST_S:
            return
        had = has
        step()


def repeat(step: Any, least_s: float, least: int) -> list[float]:
    """Seconds of each step, until both are reached; never much longer than LONGEST_S."""
    began = last = time.monotonic()
    times: list[float] = []
    while (last - began < least_s or len(times) < least) and last - began < LONGEST_S:
        step()
        now = time.monotonic()
        times.append(now - last)
        last = now
    return times
