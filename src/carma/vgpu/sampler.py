"""core.ports.Sampler over virtual GPUs: the same figures that NVML and its GPM metrics would give, and the same gaps.

Activity and power are exact means since the sampler's previous look (as GPM's are, between two samples); the first look
shows the moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.values import Activity, Capabilities, Gpu, GpuId, GpuSample, ProcessUse
from carma.core.scheduling.sharing_model import engine_shown
from carma.errors import CarmaError
from carma.vgpu.device import Device, reap
from carma.vgpu.device_state import VirtualGpu, VirtualProcess, World, load_now, power_w, rates

_CAPABILITIES = Capabilities(
    metrics=("sm_active", "sm_occupancy", "dram_active", "gr_active"),
    power=True,
    energy=True,
    processes=True,
    source="virtual",
)
_LOST = "the GPU has fallen off the bus"


class VirtualSampler:
    """Looks at one world. The GPUs are read once: like real cards they stay until the machine is rebuilt."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._gpus = tuple(_gpu(gpu) for gpu in device.look().gpus)
        self._before: World | None = None

    def gpus(self) -> tuple[Gpu, ...]:
        return self._gpus

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        try:
            world = self._look()
        except (CarmaError, OSError) as error:
            self._before = None
            return tuple(
                GpuSample(gpu=gpu.id, at=at, fault=f"the driver does not answer: {error}") for gpu in self._gpus
            )
        before, self._before = self._before, world
        now_rates = rates(world)
        found = {gpu.id: self._one(world, before, gpu, now_rates, at) for gpu in world.gpus}
        return tuple(found.get(gpu.id) or GpuSample(gpu=gpu.id, at=at, fault=_LOST) for gpu in self._gpus)

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """Leaves alone what the next sample's means begin with."""
        try:
            world = self._look()
        except (CarmaError, OSError) as error:
            return tuple(GpuSample(gpu=gpu, at=at, fault=f"the driver does not answer: {error}") for gpu in gpus)
        return tuple(_memory_sample(world, gpu, at) for gpu in gpus)

    def close(self) -> None:
        self._before = None

    def _look(self) -> World:
        """Takes the lock only when there is a dead process to drop."""
        world = self._device.look()
        if not reap(world):
            return world
        with self._device.changing() as world:
            return world

    def _one(self, world: World, before: World | None, gpu: VirtualGpu, now_rates: list[float], at: float) -> GpuSample:
        if gpu.lost:
            return GpuSample(gpu=GpuId(gpu.id), at=at, fault=_LOST)
        processes = None if "processes" in gpu.faults else _processes(world, before, gpu, now_rates)
        used_mib = world.used_mib(gpu.index)
        if "metrics" in gpu.faults:
            return GpuSample(gpu=GpuId(gpu.id), at=at, memory_used_mib=used_mib, processes=processes)
        activity, util, watts = _load(world, before, gpu, now_rates)
        return GpuSample(
            gpu=GpuId(gpu.id),
            at=at,
            memory_used_mib=used_mib,
            activity=activity,
            gpu_util=util,
            power_w=watts,
            energy_j=gpu.energy_j,
            processes=processes,
        )


def _gpu(gpu: VirtualGpu) -> Gpu:
    return Gpu(
        id=GpuId(gpu.id),
        index=gpu.index,
        name=gpu.name,
        memory_mib=gpu.memory_mib,
        kind="virtual",
        capabilities=_CAPABILITIES,
    )


def _memory_sample(world: World, gpu_id: GpuId, at: float) -> GpuSample:
    gpu = world.gpu(gpu_id)
    if gpu is None or gpu.lost:
        return GpuSample(gpu=gpu_id, at=at, fault=_LOST)
    processes = tuple(
        ProcessUse(pid=process.pid, memory_mib=process.memory_mib, name=process.name) for process in world.on(gpu.index)
    )
    return GpuSample(
        gpu=gpu_id,
        at=at,
        memory_used_mib=world.used_mib(gpu.index),
        processes=None if "processes" in gpu.faults else processes,
    )


def _load(world: World, before: World | None, gpu: VirtualGpu, now_rates: list[float]) -> tuple[Activity, float, float]:
    """Activity, coarse utilisation and watts: means since `before`, or of the moment."""
    engine = _engine(world, gpu, now_rates)
    then = before.gpu(gpu.id) if before is not None else None
    span_s = world.at_s - before.at_s if before is not None else 0.0
    if then is None or then.lost or span_s <= 0.0:
        load, util = load_now(world, gpu, now_rates)
        activity = Activity(
            sm_active=load.sm_active, sm_occupancy=load.sm_occupancy, dram_active=load.dram_active, gr_active=engine
        )
        return activity, util, power_w(gpu, load)
    activity = Activity(
        sm_active=_part((gpu.sm_active_s - then.sm_active_s) / span_s),
        sm_occupancy=_part((gpu.sm_occupancy_s - then.sm_occupancy_s) / span_s),
        dram_active=_part((gpu.dram_active_s - then.dram_active_s) / span_s),
        gr_active=engine,
    )
    return (
        activity,
        _part((gpu.gpu_util_s - then.gpu_util_s) / span_s),
        max(0.0, (gpu.energy_j - then.energy_j) / span_s),
    )


def _engine(world: World, gpu: VirtualGpu, now_rates: list[float]) -> float:
    """At this moment, as the sharing model takes it of those tasks: coarse utilisation is made up to mislead."""
    here = zip(world.processes, now_rates, strict=True)
    pairs = [(process.on(gpu.index), rate) for process, rate in here if gpu.index in process.gpus]
    busy = [(demand, rate) for demand, rate in pairs if demand.sm_active > 0.0]
    return _part(engine_shown([demand for demand, _ in busy], [rate for _, rate in busy]))


def _processes(world: World, before: World | None, gpu: VirtualGpu, now_rates: list[float]) -> tuple[ProcessUse, ...]:
    shares = dict(zip((id(process) for process in world.processes), now_rates, strict=True))
    return tuple(
        ProcessUse(
            pid=process.pid,
            memory_mib=process.memory_mib,
            sm_active=_part(process.on(gpu.index).sm_active * _rate(world, before, process, shares[id(process)])),
            name=process.name,
        )
        for process in world.on(gpu.index)
    )


def _rate(world: World, before: World | None, process: VirtualProcess, rate_now: float) -> float:
    then = before.process(process.pid, process.start_ticks) if before is not None else None
    if before is None or then is None or world.at_s <= before.at_s:
        return rate_now
    return (process.progress_s - then.progress_s) / (world.at_s - before.at_s)


def _part(value: float) -> float:
    return min(1.0, max(0.0, value))
