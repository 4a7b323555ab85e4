"""One look at one GPU. Figures that its capabilities do not name are not asked for and stay None."""

from __future__ import annotations

from typing import Any

from carma.core.model.values import NO_ACTIVITY, GpuSample
from carma.monitor.devices import Device, ask_memory
from carma.monitor.gpu_faults import Nvml, ask

NOT_GIVEN_32 = (1 << 32) - 1


def read(nvml: Nvml, device: Device, at: float) -> GpuSample:
    """Raises GpuLost and DriverGone. Memory comes first: it tells whether the card answers at all."""
    memory = ask_memory(nvml, device.handle, device.memory_version)
    activity = device.reader.read() if device.reader is not None else NO_ACTIVITY
    power_w = _power_w(nvml, device.handle) if device.gpu.capabilities.power else None
    return GpuSample(
        gpu=device.gpu.id,
        at=at,
        memory_used_mib=None if memory is None else memory.used_mib,
        activity=activity,
        gpu_util=_gpu_util(device.utilisation.get()),
        power_w=power_w,
        energy_j=None if device.energy is None else device.energy.read(power_w),
        processes=None if device.processes is None else device.processes.read(),
    )


def read_memory(nvml: Nvml, device: Device, at: float) -> GpuSample:
    """Memory and processes only. Raises GpuLost and DriverGone."""
    memory = ask_memory(nvml, device.handle, device.memory_version)
    return GpuSample(
        gpu=device.gpu.id,
        at=at,
        memory_used_mib=None if memory is None else memory.used_mib,
        processes=None if device.processes is None else device.processes.read(),
    )


def _gpu_util(rates: Any) -> float | None:
    """The share of time in which any kernel ran: 97 % at 25 % SM activity (two small tasks, H200). Shown only."""
    return None if rates is None or rates.gpu > 100 else rates.gpu / 100.0


def _power_w(nvml: Nvml, handle: Any) -> float | None:
    milliwatts = ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    return None if milliwatts is None or milliwatts == NOT_GIVEN_32 else milliwatts / 1000.0
