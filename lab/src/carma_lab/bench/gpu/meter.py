"""Activity, power and energy of a GPU over a span.

Activity, power and memory come from the sampler that the daemon uses, at even distances. GPM's figures are averages
between two samples, so their mean is the mean of the span. To be cheap, that sampler asks for the energy counter and
for the coarse utilisation only now and then; over a few seconds both would be stale, so they are read here directly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from carma.core.model.values import ACTIVITY_METRICS, Gpu, GpuSample
from carma.core.ports import Sampler
from carma.monitor.gpu_faults import DriverGone, GpuLost, Nvml, ask

EVERY_S = 0.4
FROM_COUNTER = "the driver's energy counter, read at both ends of the span"
FROM_POWER = "power, read at every sample of the span and integrated"
FRACTIONS = ACTIVITY_METRICS
NOT_GIVEN_64 = (1 << 64) - 1


class Gauges:
    """Two figures of a whole card, as they are now. None where the driver does not give them."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def energy_j(self, gpu: Gpu) -> float | None:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu)
        return None if millijoules is None or millijoules == NOT_GIVEN_64 else millijoules / 1000.0

    def gpu_util(self, gpu: Gpu) -> float | None:
        rates = self._ask("nvmlDeviceGetUtilizationRates", gpu)
        return None if rates is None or rates.gpu > 100 else rates.gpu / 100.0

    def _ask(self, function: str, gpu: Gpu) -> Any:
        """A MIG instance has neither; a card keeps NVML's index (monitor/devices.py)."""
        if gpu.kind != "card":
            return None
        try:
            handle = ask(self._nvml, "nvmlDeviceGetHandleByIndex", gpu.index)
            return None if handle is None else ask(self._nvml, function, handle)
        except (DriverGone, GpuLost):
            return None


class TimedSample(NamedTuple):
    at: float  # monotonic
    sample: GpuSample
    energy_j: float | None
    gpu_util: float | None


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU showed over a span: means, and the energy it took; None where it does not give it."""

    gr_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None


class Reading(Shown, frozen=True, kw_only=True):
    seconds: float | None = None  # between the first one and the last
    memory_used_mib: int | None = None  # at the end of the span
    memory_by_pid: dict[int, int] = {}


def read(sampler: Sampler, gauges: Gauges, gpus: Sequence[Gpu], begin: float, seconds: float) -> Reading:
    """Samples the GPUs from `begin` (monotonic) on. Several (MIG instances) give one reading: means, and sums."""
    timed: dict[str, list[TimedSample]] = {gpu.id: [] for gpu in gpus}
    parts = max(1, round(seconds / EVERY_S))
    for part in range(parts + 1):
        sleep_until(begin + seconds * part / parts)
        samples = {sample.gpu: sample for sample in sampler.sample(time.time())}
        for gpu in gpus:
            if gpu.id in samples:
                energy_j = gauges.energy_j(gpu) if part in (0, parts) else None
                timed[gpu.id].append(TimedSample(time.monotonic(), samples[gpu.id], energy_j, gauges.gpu_util(gpu)))
    each = [summed_up(of_one) for of_one in timed.values()]
    return each[0] if len(each) == 1 else _joined(each)


def summed_up(timed: Sequence[TimedSample]) -> Reading:
    """The first sample only marks the begin of the span."""
    if len(timed) < 2:
        return Reading()
    later, last = timed[1:], timed[-1].sample
    processes = last.processes or ()
    return Reading(
        **{name: mean([getattr(one.sample.activity, name) for one in later]) for name in FRACTIONS},
        gpu_util=mean([one.gpu_util for one in later]),
        power_w=mean([one.sample.power_w for one in later]),
        energy_j=spent_j(timed),
        seconds=timed[-1].at - timed[0].at,
        memory_used_mib=last.memory_used_mib,
        memory_by_pid={process.pid: process.memory_mib for process in processes if process.memory_mib is not None},
    )


def _joined(each: Sequence[Reading]) -> Reading:
    """Power and energy are the card's, so instances that share one would count it many times: not given."""
    memory = [reading.memory_used_mib for reading in each]
    return Reading(
        **{name: mean([getattr(reading, name) for reading in each]) for name in FRACTIONS},
        seconds=mean([reading.seconds for reading in each]),
        memory_used_mib=None if None in memory else sum(part or 0 for part in memory),
        memory_by_pid={pid: mib for reading in each for pid, mib in reading.memory_by_pid.items()},
    )


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def spent_j(timed: Sequence[TimedSample]) -> float | None:
    """Energy by the counter, otherwise by power. A counter that decreased was reset, so its energy is unknown."""
    first, last = timed[0].energy_j, timed[-1].energy_j
    if first is None or last is None:
        return integrated([(one.at, one.sample.power_w) for one in timed])
    return last - first if last >= first else None


def integrated(powers: Sequence[tuple[float, float | None]]) -> float | None:
    """Joules, by the trapezoid rule; None as soon as one is missing, because the sum would be too small."""
    total_j = 0.0
    for (at, watts), (later, later_watts) in pairwise(powers):
        if watts is None or later_watts is None:
            return None
        total_j += (watts + later_watts) / 2 * (later - at)
    return total_j if len(powers) > 1 else None


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
