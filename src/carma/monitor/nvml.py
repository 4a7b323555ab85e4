"""The sampler over NVML. Opening it may fail with a clear error; sampling never does.

A GPU that is lost gives samples with a `fault` while the others go on. If the driver goes away (an upgrade, a reload),
all samples have faults until NVML can be opened again, which is tried at increasing intervals. No `nvidia-smi` is run.
For one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from carma.core.model.values import Gpu, GpuId, GpuSample
from carma.errors import NoGpus
from carma.monitor import process_listing as listing
from carma.monitor.dcgm import DcgmReader, DcgmThread
from carma.monitor.devices import Devices, Environment, GpuDevice, find
from carma.monitor.gpm import ENGINE_S
from carma.monitor.gpu_faults import Code, DriverGone, GpuLost, Nvml, ask, code_of
from carma.monitor.query_intervals import BackOff

_WORSE_THAN_DCGM = ("inferred", "processes", "nvml")
_HINT = "Without a GPU, try virtual ones: carma up --virtual-gpus 4. With one, check that the NVIDIA driver is loaded."

Read = Callable[[GpuDevice, float], GpuSample]


class NvmlSampler:
    """`nvml` is the pynvml module, or one that behaves like it. Without `dcgm` no host engine is queried. `measured`
    False: no GPM either (monitor.sm_activity)."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        process_name: Callable[[int], str] = listing.process_name,
        own_pid: Callable[[int], int] = listing.same_pid,
        dcgm: DcgmThread | None = None,
        engine_s: float = ENGINE_S,
        measured: bool = True,
    ) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._environment = Environment(monotonic, process_name, own_pid, engine_s, measured)
        self._dcgm = dcgm
        self._known: dict[GpuId, tuple[Gpu, GpuId]] = {}  # the GPU and its card
        self._devices: dict[GpuId, GpuDevice] = {}
        self._problems: tuple[str, ...] = ()
        self._down: str | None = None  # why NVML is not open
        self._closed = False
        # A lost GPU has to be reset by hand before it returns, and opening NVML beside one can take seconds.
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
        """GPUs of the first opening, changed by later ones. A card that stops answering stays, with a fault."""
        return tuple(sorted((gpu for gpu, _ in self._known.values()), key=lambda gpu: gpu.index))

    def problems(self) -> tuple[str, ...]:
        """Sentences about cards that tasks cannot use."""
        return self._problems

    def activity_problem(self) -> str | None:
        """Why DCGM gives no activity for a GPU that needs it; None if no GPU lacks it."""
        return None if self._dcgm is None else self._dcgm.problem

    def driver(self) -> str:
        """The driver's version, for the record of a measurement; empty if unknown."""
        try:
            return str(ask(self._nvml, "nvmlSystemGetDriverVersion") or "")
        except (DriverGone, GpuLost):
            return ""

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        if self._closed:
            return _faulty([gpu.id for gpu in self.gpus()], at, "the sampler is closed")
        if self._down is not None and self._driver_retry.due(self._monotonic()):
            self._reopen()
        self._use_dcgm()
        samples = self._read_all([gpu.id for gpu in self.gpus()], at, GpuDevice.sample)
        if self._down is None:
            self._retry_lost(samples)
        return samples

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """Samples memory. It notices that the driver has gone; `sample` opens it again."""
        if self._closed:
            return _faulty(gpus, at, "the sampler is closed")
        return self._read_all(gpus, at, GpuDevice.sample_memory)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._shut()
            if self._dcgm is not None:
                self._dcgm.close()

    def _read_all(self, gpus: Sequence[GpuId], at: float, read: Read) -> tuple[GpuSample, ...]:
        """All samples or, if the driver goes away meanwhile, a fault for each."""
        if self._down is None:
            try:
                return tuple(self._read(gpu, at, read) for gpu in gpus)
            except DriverGone as error:
                self._down = str(error)
                self._driver_retry.reset()
                self._driver_retry.due(self._monotonic())
        return _faulty(gpus, at, f"the NVIDIA driver does not answer: {self._down}")

    def _read(self, gpu: GpuId, at: float, read: Read) -> GpuSample:
        device = self._devices.get(gpu)
        if device is None:
            return GpuSample(gpu=gpu, at=at, fault="the GPU is no longer there")
        try:
            return read(device, at)
        except GpuLost as error:
            return GpuSample(gpu=gpu, at=at, fault=f"the GPU does not answer: {error}")

    def _use_dcgm(self) -> None:
        """DCGM may start, or know a GPU, only later. After its first figure it stays the source, with gaps."""
        if self._dcgm is None:
            return
        for device in self._devices.values():
            if device.gpu.capabilities.source in _WORSE_THAN_DCGM and self._dcgm.offers(device.place):
                device.use(DcgmReader(self._dcgm, device.place))
                self._known[device.gpu.id] = (device.gpu, device.place.card)

    def _retry_lost(self, samples: tuple[GpuSample, ...]) -> None:
        """A card that was reset answers only to a new handle, so NVML is opened again at intervals."""
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
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            upgraded = code_of(error) == Code.LIB_RM_VERSION_MISMATCH
            hint = " The driver was upgraded: restart the machine, then carma." if upgraded else ""
            raise DriverGone(f"{error}{hint}") from error
        devices = find(self._nvml, self._environment)
        self._devices = {device.gpu.id: device for device in devices.found}
        self._problems = tuple(devices.problems)
        self._known = self._merge(devices)
        if self._dcgm is not None:
            coarse = [device for device in devices.found if device.gpu.capabilities.source in _WORSE_THAN_DCGM]
            self._dcgm.watch(device.place for device in coarse)
            self._use_dcgm()

    def _merge(self, devices: Devices) -> dict[GpuId, tuple[Gpu, GpuId]]:
        """A known GPU that was not found stays unless its card answers, which means that the MIG layout changed."""
        missing = {gpu: entry for gpu, entry in self._known.items() if entry[1] not in devices.answering}
        return missing | {device.gpu.id: (device.gpu, device.place.card) for device in devices.found}

    def _shut(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices = {}
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _faulty(gpus: Iterable[GpuId], at: float, fault: str) -> tuple[GpuSample, ...]:
    return tuple(GpuSample(gpu=gpu, at=at, fault=fault) for gpu in gpus)


def load_nvml() -> Nvml:
    """The binding. Opening it shows whether a driver answers."""
    import pynvml  # here, because its import takes too long for `carma --help`

    module: Any = pynvml
    return module


def open_nvml(engine_s: float = ENGINE_S, *, measured: bool = True) -> NvmlSampler:
    """The GPUs of this machine. Raises NoGpus with a hint to virtual GPUs.

    `engine_s`: interval of querying engine activity; 0 for a study that needs it in each sample. `measured` False:
    without GPM and DCGM.
    """
    own_pid = listing.translation(os.environ)
    dcgm = DcgmThread() if measured else None
    return NvmlSampler(load_nvml(), own_pid=own_pid, dcgm=dcgm, engine_s=engine_s, measured=measured)
