"""What a GPU showed over a span: activity, power and energy, from the sampler that the daemon uses.

Samples are taken at even distances. GPM's figures are averages between two samples, so their mean is the mean of the
span. The sampler's own energy counter is carried forward by power for ten seconds at a time and corrected in jumps
(monitor/energy.py), which is too coarse for a few seconds: energy here is power, read at every sample and integrated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from carma.core.model import Gpu, GpuSample
from carma.core.ports import Sampler

EVERY_S = 0.4
ENERGY_FROM = "power, read at every sample of the span and integrated"
FRACTIONS = ("gr_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "gpu_util")


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the span; None where the GPU does not give it."""

    gr_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    seconds: float | None = None  # between the first look and the last
    memory_used_mib: int | None = None  # at the end of the span
    memory_by_pid: dict[int, int] = {}


def read(sampler: Sampler, gpus: Sequence[Gpu], begin: float, seconds: float) -> Reading:
    """Look at those GPUs from `begin` (monotonic) on. Several (MIG instances) give one reading: means, and sums."""
    looks: list[tuple[float, dict[str, GpuSample]]] = []
    parts = max(1, round(seconds / EVERY_S))
    for part in range(parts + 1):
        sleep_until(begin + seconds * part / parts)
        looks.append((time.monotonic(), {sample.gpu: sample for sample in sampler.sample(time.time())}))
    each = [_of_one([(at, samples[gpu.id]) for at, samples in looks if gpu.id in samples]) for gpu in gpus]
    return each[0] if len(each) == 1 else _joined(each)


def _of_one(looks: list[tuple[float, GpuSample]]) -> Reading:
    """The first look only says where the span begins."""
    samples = [sample for _, sample in looks[1:]]
    if not samples:
        return Reading()
    last = samples[-1]
    processes = last.processes or ()
    return Reading(
        **{name: mean([getattr(sample, name) for sample in samples]) for name in FRACTIONS},
        power_w=mean([sample.power_w for sample in samples]),
        energy_j=integrated([(at, sample.power_w) for at, sample in looks]),
        seconds=looks[-1][0] - looks[0][0],
        memory_used_mib=last.memory_used_mib,
        memory_by_pid={process.pid: process.memory_mib for process in processes if process.memory_mib is not None},
    )


def _joined(each: Sequence[Reading]) -> Reading:
    """Power and energy are the card's, so instances that share one would count it many times: not given."""
    memory = [reading.memory_used_mib for reading in each]
    return Reading(
        **{name: mean([getattr(reading, name) for reading in each]) for name in FRACTIONS},
        memory_used_mib=None if None in memory else sum(part or 0 for part in memory),
        memory_by_pid={pid: mib for reading in each for pid, mib in reading.memory_by_pid.items()},
    )


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def integrated(looks: Sequence[tuple[float, float | None]]) -> float | None:
    """Joules, by the trapezoid rule; None as soon as one look is missing, because the sum would be too small."""
    total_j = 0.0
    for (at, watts), (later, later_watts) in pairwise(looks):
        if watts is None or later_watts is None:
            return None
        total_j += (watts + later_watts) / 2 * (later - at)
    return total_j if len(looks) > 1 else None


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
