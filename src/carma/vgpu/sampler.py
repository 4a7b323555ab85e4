"""core.ports.Sampler over virtual GPUs: the figures that NVML and its GPM metrics would give, with the same gaps.

Activity and power are exact means since the previous sample (as GPM's are, between two snapshots); the first sample
shows the moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities, Gpu, GpuId, GpuSample, ProcessUse
from carma.core.scheduling.sharing_model import engine_shown
from carma.errors import CarmaError
from carma.vgpu.device import Device, reap
from carma.vgpu.device_state import Progress, VirtualGpu, VirtualWorld, load_now, power_w, progress

_CAPABILITIES = Capabilities(
    metrics=("sm_active", "sm_occupancy", "dram_active", "gr_active"),
    power=True,
    energy=True,
    processes=True,
    source="virtual",
)
_WITHOUT_COUNTERS = replace(_CAPABILITIES, metrics=(), source="inferred")
_LOST = "the GPU has fallen off the bus"


class VirtualSampler:
    """Samples one world. Its GPUs are read once: like real cards they stay until the machine is rebuilt.

    `measured` False: the GPUs show power and utilisation, but no activity (monitor.sm_activity).
    """

    def __init__(self, device: Device, *, measured: bool = True) -> None:
        self._device = device
        self._measured = measured
        self._gpus = tuple(_gpu(gpu, measured) for gpu in device.read().gpus)
        self._before: VirtualWorld | None = None

    def gpus(self) -> tuple[Gpu, ...]:
        return self._gpus

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        gpus = [gpu.id for gpu in self._gpus]
        before, self._before = self._before, None
        try:
            world = self._before = self._read()
        except (CarmaError, OSError) as error:
            return _faults(gpus, at, error)
        moving = progress(world)
        samples = tuple(_sample(world, before, moving, gpu, at) for gpu in gpus)
        return samples if self._measured else tuple(_without_counters(sample) for sample in samples)

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        """Does not change the span of the next sample's means."""
        try:
            world = self._read()
        except (CarmaError, OSError) as error:
            return _faults(gpus, at, error)
        return tuple(_memory_sample(world, gpu, at) for gpu in gpus)

    def close(self) -> None:
        self._before = None

    def _read(self) -> VirtualWorld:
        """Takes the lock only if a process has ended, stopped or continued."""
        world = self._device.read()
        if not reap(world):
            return world
        with self._device.changing() as world:
            return world


def _faults(gpus: Sequence[GpuId], at: float, error: Exception) -> tuple[GpuSample, ...]:
    return tuple(GpuSample(gpu=gpu, at=at, fault=f"the driver does not answer: {error}") for gpu in gpus)


def _without_counters(sample: GpuSample) -> GpuSample:
    uses = sample.processes
    bare = None if uses is None else tuple(replace(use, sm_active=None) for use in uses)
    return replace(sample, activity=NO_ACTIVITY, processes=bare)


def _gpu(gpu: VirtualGpu, measured: bool) -> Gpu:
    return Gpu(
        id=GpuId(gpu.id),
        index=gpu.index,
        name=gpu.name,
        memory_mib=gpu.memory_mib,
        kind="virtual",
        capabilities=_CAPABILITIES if measured else _WITHOUT_COUNTERS,
        power_limit_w=gpu.peak_w,
    )


def _memory_sample(world: VirtualWorld, gpu_id: GpuId, at: float) -> GpuSample:
    gpu = world.gpu(gpu_id)
    if gpu is None or gpu.lost:
        return GpuSample(gpu=gpu_id, at=at, fault=_LOST)
    uses = tuple(ProcessUse(pid=one.pid, memory_mib=one.memory_mib, name=one.name) for one in world.on(gpu.index))
    processes = None if "processes" in gpu.faults else uses
    return GpuSample(gpu=gpu_id, at=at, memory_used_mib=world.used_mib(gpu.index), processes=processes)


def _sample(world: VirtualWorld, before: VirtualWorld | None, moving: Progress, gpu_id: GpuId, at: float) -> GpuSample:
    memory, gpu = _memory_sample(world, gpu_id, at), world.gpu(gpu_id)
    if gpu is None or gpu.lost:
        return memory
    if memory.processes is not None:
        active = _process_activity(world, before, gpu, moving)
        uses = zip(memory.processes, active, strict=True)
        memory = replace(memory, processes=tuple(replace(use, sm_active=share) for use, share in uses))
    if "metrics" in gpu.faults:
        return memory
    activity, util, watts = _load(world, before, gpu, moving)
    return replace(memory, activity=activity, gpu_util=util, power_w=watts, energy_j=gpu.energy_j)


def _load(
    world: VirtualWorld, before: VirtualWorld | None, gpu: VirtualGpu, moving: Progress
) -> tuple[Activity, float, float]:
    """Activity, coarse utilisation and watts: means since `before`, or of the moment."""
    engine = _engine(gpu, moving)
    then = before.gpu(gpu.id) if before is not None else None
    span_s = world.at_s - before.at_s if before is not None else 0.0
    if then is None or then.lost or span_s <= 0.0:
        load, util = load_now(gpu, moving)
        sm, occupancy, dram, watts = load.sm_active, load.sm_occupancy, load.dram_active, power_w(gpu, load)
    else:
        sm = _share((gpu.sm_active_s - then.sm_active_s) / span_s)
        occupancy = _share((gpu.sm_occupancy_s - then.sm_occupancy_s) / span_s)
        dram = _share((gpu.dram_active_s - then.dram_active_s) / span_s)
        util = _share((gpu.gpu_util_s - then.gpu_util_s) / span_s)
        watts = max(0.0, (gpu.energy_j - then.energy_j) / span_s)
    return Activity(sm_active=sm, sm_occupancy=occupancy, dram_active=dram, gr_active=engine), util, watts


def _engine(gpu: VirtualGpu, moving: Progress) -> float:
    """Engine activity at this moment by the sharing model; coarse utilisation is misleading on purpose."""
    pairs = [(process.on(gpu.index), rate) for process, rate in moving if gpu.index in process.gpus]
    busy = [(demand, rate) for demand, rate in pairs if demand.sm_active > 0.0]
    return _share(engine_shown([demand for demand, _ in busy], [rate for _, rate in busy]))


def _process_activity(
    world: VirtualWorld, before: VirtualWorld | None, gpu: VirtualGpu, moving: Progress
) -> list[float]:
    """The SM activity of each process on the GPU: the mean since `before`, or of the moment."""
    found = []
    for process, rate in moving:
        if gpu.index in process.gpus:
            then = before.process(process.pid, process.start_ticks) if before is not None else None
            if before is not None and then is not None and world.at_s > before.at_s:
                rate = (process.progress_s - then.progress_s) / (world.at_s - before.at_s)
            found.append(_share(process.on(gpu.index).sm_active * rate))
    return found


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
