"""One look at one GPU. Figures that its capabilities do not name are not asked for and stay None.

A process's own SM activity is left out: NVML's per-process utilisation names one of two time-sliced processes, and
under MPS the server in place of its clients (both seen on an H200, driver 580).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from carma.core.model import GpuSample, ProcessUse
from carma.monitor.devices import COMPUTE_PROCESSES, MIB, NOT_GIVEN_32, NOT_GIVEN_64, Device, ask_memory
from carma.monitor.faults import Nvml, ask
from carma.monitor.gpm import NO_ACTIVITY

# A process that computes and draws is on both lists. MPS clients are on the first, each with its own memory, beside the
# MPS server (seen on an H200, driver 580), so NVML's list of MPS clients is not asked for.
_PROCESS_LISTS = (
    COMPUTE_PROCESSES,
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)


def read(nvml: Nvml, device: Device, at: float, process_name: Callable[[int], str]) -> GpuSample:
    """Raises GpuLost and DriverGone. Memory comes first: it tells whether the card answers at all."""
    memory = ask_memory(nvml, device.handle, device.memory_version)
    activity = device.gpm.read() if device.gpm is not None else NO_ACTIVITY
    can = device.gpu.capabilities
    power_w = _power_w(nvml, device.handle) if can.power else None
    return GpuSample(
        gpu=device.gpu.id,
        at=at,
        memory_used_mib=None if memory is None else memory.used_mib,
        sm_active=activity.sm_active,
        sm_occupancy=activity.sm_occupancy,
        dram_active=activity.dram_active,
        gpu_util=_gpu_util(nvml, device.handle),
        power_w=power_w,
        energy_j=None if device.energy is None else device.energy.read(power_w),
        processes=_processes(nvml, device.handle, process_name) if can.processes else None,
    )


def process_name(pid: int) -> str:
    """The kernel's short name of a process; empty when it is gone or hidden from us."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _gpu_util(nvml: Nvml, handle: Any) -> float | None:
    """The share of time in which any kernel ran: 97 % at 25 % SM activity (two small tasks, H200). Shown only."""
    rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None or rates.gpu > 100 else rates.gpu / 100.0


def _power_w(nvml: Nvml, handle: Any) -> float | None:
    milliwatts = ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    return None if milliwatts is None or milliwatts == NOT_GIVEN_32 else milliwatts / 1000.0


def _processes(nvml: Nvml, handle: Any, name: Callable[[int], str]) -> tuple[ProcessUse, ...] | None:
    """Every process once, with the most memory that any list gives for it. None when no list came."""
    lists = [entries for versions in _PROCESS_LISTS if (entries := _list(nvml, versions, handle)) is not None]
    if not lists:
        return None
    memory_mib: dict[int, int | None] = {}
    for entries in lists:
        for pid, used_mib in _sums(entries).items():
            known = memory_mib.get(pid)
            memory_mib[pid] = used_mib if known is None else max(known, used_mib or 0)
    return tuple(ProcessUse(pid=pid, memory_mib=memory_mib[pid], name=name(pid)) for pid in sorted(memory_mib))


def _list(nvml: Nvml, versions: tuple[str, ...], handle: Any) -> Any:
    for version in versions:
        if (entries := ask(nvml, version, handle)) is not None:
            return entries
    return None


def _sums(entries: Any) -> dict[int, int | None]:
    """MiB by process; a process with several contexts has several entries. Not available stays None."""
    sums: dict[int, int | None] = {}
    for entry in entries:
        used = entry.usedGpuMemory
        before = sums.get(entry.pid)
        if used is None or used == NOT_GIVEN_64:
            sums[entry.pid] = before
        else:
            sums[entry.pid] = (before or 0) + -(-used // MIB)
    return sums
