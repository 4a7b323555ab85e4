"""The sampler over NVML. Opening it may fail with a clear error; sampling never does.

A GPU that is lost gives samples with a `fault` while the others go on. A driver that went away (an upgrade, a reload)
gives faults for all of them until NVML can be opened again, which is tried less and less often. No `nvidia-smi` is run.
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
from carma.monitor import namespaces
from carma.monitor import process_listing as listing
from carma.monitor import readings as reading
from carma.monitor.backoff import BackOff
from carma.monitor.dcgm_thread import DcgmFeed, DcgmReader
from carma.monitor.devices import Device, Devices, Means, find
from carma.monitor.gpm import ENGINE_S
from carma.monitor.gpu_faults import Code, DriverGone, GpuLost, Nvml, ask, code_of

_WORSE_THAN_DCGM = ("processes", "nvml")
_HINT = "Without a GPU, try virtual ones: carma up --virtual-gpus 4. With one, check that the NVIDIA driver is loaded."


Read = Callable[[Nvml, Device, float], GpuSample]


class NvmlSampler:
    """`nvml` is the pynvml module, or one that behaves like it. Without `dcgm` nobody asks a host engine."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        process_name: Callable[[int], str] = listing.process_name,
        own_pid: Callable[[int], int] = namespaces.same_pid,
        dcgm: DcgmFeed | None = None,
        engine_s: float = ENGINE_S,
    ) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._means = Means(monotonic, process_name, own_pid, engine_s)
        self._dcgm = dcgm
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

    def activity_problem(self) -> str | None:
        """Why DCGM does not give activity, where a GPU would need it; None where all is well, or nobody needs it."""
        return None if self._dcgm is None else self._dcgm.problem

    def driver(self) -> str:
        """Its version, for the record of a measurement; empty where it is not told."""
        try:
            return str(ask(self._nvml, "nvmlSystemGetDriverVersion") or "")
        except (DriverGone, GpuLost):
            return ""

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        if self._closed:
            return _faulty([gpu.id for gpu in self.gpus()], at, "the sampler is closed")
        if self._down is not None and self._driver_retry.due(self._monotonic()):
            self._reopen()
        self._take_better()
        samples = self._read_all([gpu.id for gpu in self.gpus()], at, reading.read)
        if self._down is None:
            self._look_for_lost(samples)
        return samples

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """A driver that is gone is only noticed here; `sample` opens it again."""
        if self._closed:
            return _faulty(gpus, at, "the sampler is closed")
        return self._read_all(gpus, at, reading.read_memory)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._shut()
            if self._dcgm is not None:
                self._dcgm.close()

    def _read_all(self, gpus: Sequence[GpuId], at: float, read: Read) -> tuple[GpuSample, ...]:
        """All of them or, where the driver goes away in between, a fault for each."""
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
            return read(self._nvml, device, at)
        except GpuLost as error:
            return GpuSample(gpu=gpu, at=at, fault=f"the GPU does not answer: {error}")

    def _take_better(self) -> None:
        """DCGM may turn up, or know a GPU, only later. Once it gave a figure it stays the source, with gaps."""
        if self._dcgm is None:
            return
        for device in self._devices.values():
            if device.gpu.capabilities.source in _WORSE_THAN_DCGM and self._dcgm.offers(device.place):
                device.use(DcgmReader(self._dcgm, device.place))
                self._known[device.gpu.id] = (device.gpu, device.place.card)

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
        devices = find(self._nvml, self._means)
        self._devices = {device.gpu.id: device for device in devices.found}
        self._problems = tuple(devices.problems)
        self._known = self._merge(devices)
        if self._dcgm is not None:
            coarse = [device for device in devices.found if device.gpu.capabilities.source in _WORSE_THAN_DCGM]
            self._dcgm.want(device.place for device in coarse)
            self._take_better()

    def _merge(self, devices: Devices) -> dict[GpuId, tuple[Gpu, GpuId]]:
        """A known GPU that was not found is kept unless its card answers, which means that the MIG layout changed."""
        kept = {gpu: entry for gpu, entry in self._known.items() if entry[1] not in devices.answering}
        return kept | {device.gpu.id: (device.gpu, device.place.card) for device in devices.found}

    def _shut(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices = {}
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _faulty(gpus: Iterable[GpuId], at: float, fault: str) -> tuple[GpuSample, ...]:
    return tuple(GpuSample(gpu=gpu, at=at, fault=fault) for gpu in gpus)


def _initialise(nvml: Nvml) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        reason = str(error)
        if code_of(error) == Code.LIB_RM_VERSION_MISMATCH:
            reason += " The driver was upgraded: restart the machine, then carma."
        raise DriverGone(reason) from error


def load_nvml() -> Nvml:
    """The binding. Whether a driver answers shows when it is opened."""
    import pynvml  # here, because it takes time that `carma --help` does not have

    module: Any = pynvml
    return module


def open_nvml(engine_s: float = ENGINE_S) -> NvmlSampler:
    """The GPUs of this machine. Raises NoGpus, whose hint says how to go on without one.

    `engine_s`: engine activity is asked for no more often than that; a study that needs it in each sample says 0.
    """
    own_pid = namespaces.translation(os.environ)
    return NvmlSampler(load_nvml(), own_pid=own_pid, dcgm=DcgmFeed(), engine_s=engine_s)
