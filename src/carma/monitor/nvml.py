"""The sampler over NVML. Opening it may fail with a clear error; sampling never does.

A GPU that is lost gives samples with a `fault` while the others go on. A driver that went away (an upgrade, a reload)
gives faults for all of them until NVML can be opened again, which is tried less and less often. No `nvidia-smi` is run.
For one thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from carma.core.model import Gpu, GpuId, GpuSample
from carma.errors import NoGpus
from carma.monitor import reading
from carma.monitor.devices import Device, Devices, find
from carma.monitor.faults import Code, DriverGone, GpuLost, Nvml, ask, code_of

_HINT = "Without a GPU, try virtual ones: carma up --virtual-gpus 4. With one, check that the NVIDIA driver is loaded."


class BackOff:
    """When the next try is due: after `first_s`, then each time twice as long, up to `limit_s`."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s, self._limit_s = first_s, limit_s
        self.reset()

    def reset(self) -> None:
        self._wait_s = self._first_s
        self._due_at: float | None = None

    def due(self, now: float) -> bool:
        """Starts waiting at the first call; true once when the wait is over, and the next wait begins."""
        if self._due_at is None:
            self._due_at = now + self._wait_s
            return False
        if now < self._due_at:
            return False
        self._wait_s = min(2 * self._wait_s, self._limit_s)
        self._due_at = now + self._wait_s
        return True


class NvmlSampler:
    """`nvml` is the pynvml module, or one that behaves like it."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        process_name: Callable[[int], str] = reading.process_name,
    ) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._process_name = process_name
        self._known: dict[GpuId, tuple[Gpu, GpuId]] = {}  # the GPU and its card
        self._devices: dict[GpuId, Device] = {}
        self._problems: tuple[str, ...] = ()
        self._down: str | None = None  # why NVML is not open
        self._closed = False
        # A lost GPU needs a reset by hand before it returns, and opening NVML beside one can take seconds.
        self._driver_retry = BackOff(first_s=1.0, limit_s=60.0)
        self._gpu_retry = BackOff(first_s=30.0, limit_s=600.0)
        try:
            self._open()
        except (DriverGone, GpuLost) as error:
            self.close()
            raise NoGpus(f"The GPUs cannot be read: {error}.", _HINT) from error
        if not self._known:
            self.close()
            raise NoGpus("; ".join(self._problems) or "The NVIDIA driver answers and knows of no GPU.", _HINT)

    def gpus(self) -> tuple[Gpu, ...]:
        """Those of the start, and what a later opening changed. A card that stopped answering stays, with a fault."""
        return tuple(sorted((gpu for gpu, _ in self._known.values()), key=lambda gpu: gpu.index))

    def problems(self) -> tuple[str, ...]:
        """Sentences about cards that tasks cannot use."""
        return self._problems

    def driver(self) -> str:
        """Its version, for the record of a measurement; empty where it is not told."""
        try:
            return str(ask(self._nvml, "nvmlSystemGetDriverVersion") or "")
        except (DriverGone, GpuLost):
            return ""

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        if self._closed:
            return self._all_faulty(at, "the sampler is closed")
        if self._down is not None and self._driver_retry.due(self._monotonic()):
            self._reopen()
        samples = self._read_all(at)
        if self._down is not None:
            return self._all_faulty(at, f"the NVIDIA driver does not answer: {self._down}")
        self._look_for_lost(samples)
        return samples

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._shut()

    def _read_all(self, at: float) -> tuple[GpuSample, ...]:
        if self._down is not None:
            return ()
        try:
            return tuple(self._read(gpu.id, at) for gpu in self.gpus())
        except DriverGone as error:
            self._down = str(error)
            self._driver_retry.reset()
            self._driver_retry.due(self._monotonic())
            return ()

    def _read(self, gpu: GpuId, at: float) -> GpuSample:
        device = self._devices.get(gpu)
        if device is None:
            return GpuSample(gpu=gpu, at=at, fault="the GPU is no longer there")
        try:
            return reading.read(self._nvml, device, at, self._process_name)
        except GpuLost as error:
            return GpuSample(gpu=gpu, at=at, fault=f"the GPU does not answer: {error}")

    def _all_faulty(self, at: float, fault: str) -> tuple[GpuSample, ...]:
        return tuple(GpuSample(gpu=gpu.id, at=at, fault=fault) for gpu in self.gpus())

    def _look_for_lost(self, samples: tuple[GpuSample, ...]) -> None:
        """A card that was reset answers only to a new handle, so NVML is opened afresh now and then."""
        if not any(sample.fault for sample in samples):
            self._gpu_retry.reset()
        elif self._gpu_retry.due(self._monotonic()):
            self._reopen()

    def _reopen(self) -> None:
        self._shut()
        try:
            self._open()
        except (DriverGone, GpuLost) as error:
            self._down = str(error)
        else:
            self._down = None
            self._driver_retry.reset()

    def _open(self) -> None:
        _initialise(self._nvml)
        devices = find(self._nvml, self._monotonic)
        self._devices = {device.gpu.id: device for device in devices.found}
        self._problems = tuple(devices.problems)
        self._known = self._merge(devices)

    def _merge(self, devices: Devices) -> dict[GpuId, tuple[Gpu, GpuId]]:
        """A known GPU that was not found is kept unless its card answers, which means that the MIG layout changed."""
        kept = {gpu: entry for gpu, entry in self._known.items() if entry[1] not in devices.answering}
        return kept | {device.gpu.id: (device.gpu, device.card) for device in devices.found}

    def _shut(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices = {}
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _initialise(nvml: Nvml) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        reason = str(error)
        if code_of(error) == Code.LIB_RM_VERSION_MISMATCH:
            reason += " The driver was upgraded: restart the machine, then carma."
        raise DriverGone(reason) from error


def open_nvml() -> NvmlSampler:
    """The GPUs of this machine. Raises NoGpus, whose hint says how to go on without one."""
    import pynvml  # here, because it takes time that `carma --help` does not have

    module: Any = pynvml
    return NvmlSampler(module)
