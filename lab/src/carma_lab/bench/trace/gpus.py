"""The GPUs of `carma bench trace`: real ones, or virtual ones for a try without a card.

1. What the GPUs show over a run, by the sampler that the daemon uses and NVML's energy counter (`Meter`).
2. How tasks use them without a manager: under MPS with a control daemon of our own, or alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from carma.core.model.values import Gpu, GpuSample
from carma.core.ports import Sampler
from carma.monitor.nvml import load_nvml, open_nvml
from carma.paths import find_paths
from carma.testing.private_daemon import PrivateDaemon
from carma.vgpu.device import DIRECTORY_VARIABLE, Device
from carma.vgpu.sampler import VirtualSampler
from carma.vgpu.virtual_server import create
from carma_lab.bench.gpu.environment import sharing
from carma_lab.bench.gpu.meter import FROM_COUNTER, FROM_POWER, Gauges, TimedSample, mean, summed_up
from carma_lab.bench.trace.records import Place, Shown, today, total

EVERY_S = 0.5
VIRTUAL_MEMORY_MIB = 40_960


ReadGauges = Callable[[Gpu, GpuSample], tuple[float | None, float | None]]


class Meter:
    """Samples at even distances while `tick` is called often enough."""

    def __init__(self, sampler: Sampler, read_gauges: ReadGauges) -> None:
        """`read_gauges`: energy counter (J) and coarse utilisation of a GPU."""
        self._sampler, self._gauges = sampler, read_gauges
        self._gpus = sampler.gpus()
        self._samples: dict[str, list[TimedSample]] = {gpu.id: [] for gpu in self._gpus}
        self._began = time.monotonic()
        self.take_sample()

    def tick(self) -> None:
        if time.monotonic() >= self._began + EVERY_S * len(self._samples[self._gpus[0].id]):
            self.take_sample()

    def take_sample(self) -> None:
        samples = {sample.gpu: sample for sample in self._sampler.sample(time.time())}
        for gpu in self._gpus:
            sample = samples[gpu.id]
            energy_j, util = self._gauges(gpu, sample)
            self._samples[gpu.id].append(TimedSample(time.monotonic(), sample, energy_j, util))

    def shown(self) -> Shown:
        """Ends the span."""
        self.take_sample()
        return summary(list(self._samples.values()), time.monotonic() - self._began)

    def close(self) -> None:
        self._sampler.close()


def summary(samples: Sequence[Sequence[TimedSample]], seconds: float) -> Shown:
    """Summary of each GPU's samples."""
    each = [summed_up(of_one) for of_one in samples]
    memory = [[one.sample.memory_used_mib for one in of_one] for of_one in samples]
    tops = [max((mib for mib in of_one if mib is not None), default=None) for of_one in memory]
    return Shown(
        seconds=seconds,
        energy_j=total([reading.energy_j for reading in each]),
        power_w=total([reading.power_w for reading in each]),
        sm_active=mean([reading.sm_active for reading in each]),
        sm_occupancy=mean([reading.sm_occupancy for reading in each]),
        dram_active=mean([reading.dram_active for reading in each]),
        gpu_util=mean([reading.gpu_util for reading in each]),
        memory_mib=mean([mean(of_one) for of_one in memory]),
        memory_max_mib=max((top for top in tops if top is not None), default=None),
    )


class Outside(NamedTuple):
    """GPUs without a manager: the environment of the task at a place in the trace, and the meter."""

    environment: Callable[[int], dict[str, str]]
    meter: Callable[[], Meter]


class Gpus(Protocol):
    virtual: bool
    count: int
    daemon_gpus: int  # as the daemon takes it: 0 for real ones
    rest_s: float  # of a new daemon without tasks: it measures the idle power, to which the energy of tasks refers

    def place(self) -> Place: ...
    def energy_from(self) -> str | None: ...
    def outside(self, mechanism: str, /) -> AbstractContextManager[Outside]: ...
    def meter(self, daemon: PrivateDaemon) -> Meter: ...


class RealGpus:
    virtual = False
    daemon_gpus = 0
    rest_s = 4.0

    def __init__(self) -> None:
        with contextlib.closing(open_nvml()) as sampler:  # an error says at once that there is none
            self._gpus, self._driver = sampler.gpus(), sampler.driver()
        self.count = len(self._gpus)

    def place(self) -> Place:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in self._gpus))
        count = f"{self.count} x " if self.count > 1 else ""
        return Place(gpu=f"{count}{names}", driver=self._driver, date=today())

    def energy_from(self) -> str | None:
        shown = self._gpus[0].capabilities
        return FROM_COUNTER if shown.energy else FROM_POWER if shown.power else None

    @contextmanager
    def outside(self, mechanism: str, /) -> Iterator[Outside]:
        with sharing(mechanism) as environment:
            yield Outside(lambda place: {**environment, **self._where(place)}, self._meter)

    def _where(self, place: int) -> dict[str, str]:
        """Where there is only one GPU, it need not be named."""
        gpu = self._gpus[place % len(self._gpus)]
        named = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.id}
        return named if self.count > 1 else {}

    def meter(self, _daemon: PrivateDaemon) -> Meter:
        return self._meter()

    def _meter(self) -> Meter:
        gauges = Gauges(load_nvml())
        return Meter(open_nvml(engine_s=0.0), lambda gpu, _sample: (gauges.energy_j(gpu), gauges.gpu_util(gpu)))


class VirtualGpus:
    """One virtual GPU, whose sample has everything."""

    virtual = True
    count = daemon_gpus = 1
    rest_s = 0.0

    def place(self) -> Place:
        return Place(gpu="virtual", driver="", date=today())

    def energy_from(self) -> str | None:
        return "the virtual GPU's counter"

    @contextmanager
    def outside(self, _mechanism: str, /) -> Iterator[Outside]:
        with tempfile.TemporaryDirectory(prefix="carma-vgpu-", ignore_cleanup_errors=True) as folder:
            device = create(folder, 1, VIRTUAL_MEMORY_MIB)
            environment = {DIRECTORY_VARIABLE: folder, "CUDA_VISIBLE_DEVICES": device.read().gpus[0].id}
            yield Outside(lambda _place: environment, lambda: _virtual_meter(device))

    def meter(self, daemon: PrivateDaemon) -> Meter:
        return _virtual_meter(Device(os.fspath(find_paths(daemon.environment).vgpu_dir / "devices")))


def _virtual_meter(device: Device) -> Meter:
    return Meter(VirtualSampler(device), lambda _gpu, sample: (sample.energy_j, sample.gpu_util))
