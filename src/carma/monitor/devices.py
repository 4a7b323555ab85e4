"""Finding the GPUs that tasks can use, and what each of them tells about itself.

A card in MIG mode is not a GPU here; its instances are. Modes are looked at and never changed. Where an administrator
put several compute instances into one GPU instance, each is a GPU here and all show the memory and the activity that
they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from carma.core.model import Capabilities, Gpu, GpuId
from carma.monitor.energy import EnergyCounter
from carma.monitor.faults import GpuLost, Nvml, ask, offers
from carma.monitor.gpm import GpmReader, is_offered

MIB = 1 << 20
NOT_GIVEN_64 = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE for 64-bit figures
NOT_GIVEN_32 = (1 << 32) - 1
# Versions of the same question, newest first; the driver knows one of them (R510, R470).
COMPUTE_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


@dataclass(slots=True)
class Device:
    """A GPU with the handle to ask it by. The handle dies with the driver; the UUID does not."""

    gpu: Gpu
    handle: Any
    card: GpuId  # the card's own UUID: the same as the GPU's but for a MIG instance
    memory_version: int | None  # None: the first version, which counts the driver's own memory as used
    gpm: GpmReader | None
    energy: EnergyCounter | None

    def close(self) -> None:
        if self.gpm is not None:
            self.gpm.close()


@dataclass(slots=True)
class Devices:
    """`answering` are the cards of which everything could be read; `problems` say what is not offered to tasks."""

    found: list[Device] = field(default_factory=list)
    answering: set[GpuId] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def close(self) -> None:
        for device in self.found:
            device.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a device was found, before it was asked anything."""

    handle: Any
    index: int
    card_handle: Any
    card: GpuId
    instance: int | None  # the GPU instance's id, of a MIG instance


def find(nvml: Nvml, monotonic: Callable[[], float]) -> Devices:
    """Ask every card. One that does not answer is a problem with a sentence, and the others are found all the same.

    Cards keep NVML's index (PCI order, as nvidia-smi shows them); MIG instances are numbered after the last card.
    """
    devices = Devices()
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    next_index = count
    for index in range(count):
        try:
            for place in _places(nvml, index, next_index, devices):
                next_index += place.instance is not None
                _add(nvml, place, monotonic, devices)
        except GpuLost as error:
            devices.problems.append(f"GPU {index} cannot be used: it does not answer: {error}")
    devices.found.sort(key=lambda device: device.gpu.index)
    return devices


def _places(nvml: Nvml, index: int, next_index: int, devices: Devices) -> Iterator[_Place]:
    """The card itself, or its MIG instances."""
    handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index, heartbeat=True)
    uuid = None if handle is None else ask(nvml, "nvmlDeviceGetUUID", handle, heartbeat=True)
    if uuid is None:
        devices.problems.append(f"GPU {index} cannot be used: its handle or its UUID is not given to this user")
        return
    card = GpuId(uuid)
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != 1:
        devices.answering.add(card)
        yield _Place(handle, index, handle, card, None)
        return
    instances = _instances(nvml, handle)
    devices.answering.add(card)
    if not instances:
        devices.problems.append(f"GPU {index} cannot be used: it is in MIG mode and has no instances")
    for number, (mig_handle, instance) in enumerate(instances):
        yield _Place(mig_handle, next_index + number, handle, card, instance)


def _instances(nvml: Nvml, card: Any) -> list[tuple[Any, int]]:
    """Handles of the card's MIG devices, each with the id of its GPU instance. The numbering has holes."""
    most = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0
    handles = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, number) for number in range(most)]
    with_ids = [(handle, ask(nvml, "nvmlDeviceGetGpuInstanceId", handle)) for handle in handles if handle is not None]
    return [(handle, instance) for handle, instance in with_ids if instance is not None]


def _add(nvml: Nvml, place: _Place, monotonic: Callable[[], float], devices: Devices) -> None:
    try:
        device = _device(nvml, place, monotonic)
        problem = "it does not tell its UUID or its memory"
    except GpuLost as error:
        device, problem = None, f"it does not answer: {error}"
    if device is None:
        devices.answering.discard(place.card)
        devices.problems.append(f"GPU {place.index} cannot be used: {problem}")
    else:
        devices.found.append(device)


def _device(nvml: Nvml, place: _Place, monotonic: Callable[[], float]) -> Device | None:
    handle = place.handle
    uuid = place.card if place.instance is None else ask(nvml, "nvmlDeviceGetUUID", handle)
    version = _memory_version(nvml, handle)
    memory = ask_memory(nvml, handle, version)
    if uuid is None or memory is None:
        return None
    gpm = GpmReader(nvml, place.card_handle, place.instance, monotonic) if is_offered(nvml, place.card_handle) else None
    gpu = Gpu(
        id=GpuId(uuid),
        index=place.index,
        name=ask(nvml, "nvmlDeviceGetName", handle) or "unknown GPU",
        memory_mib=memory.usable_mib,
        kind="card" if place.instance is None else "mig",
        capabilities=_capabilities(nvml, handle, gpm),
    )
    energy = EnergyCounter(nvml, handle, monotonic) if gpu.capabilities.energy else None
    return Device(gpu, handle, place.card, version, gpm, energy)


def _capabilities(nvml: Nvml, handle: Any, gpm: GpmReader | None) -> Capabilities:
    fine = gpm is not None and gpm.offered
    return Capabilities(
        sm_active=fine,
        sm_occupancy=fine,
        dram_active=fine,
        power=offers(nvml, "nvmlDeviceGetPowerUsage", handle),
        energy=offers(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle),
        processes=any(offers(nvml, version, handle) for version in COMPUTE_PROCESSES),
        source="gpm" if fine else "nvml",
    )


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    usable_mib: int  # without what the driver keeps for itself
    used_mib: int


def ask_memory(nvml: Nvml, handle: Any, version: int | None) -> MemoryInfo | None:
    """The heartbeat: every working card answers it, or says that it is not offered.

    The second version tells the driver's own memory apart; the first counts it as used by somebody.
    """
    arguments = (handle,) if version is None else (handle, version)
    answer = ask(nvml, "nvmlDeviceGetMemoryInfo", *arguments, heartbeat=True)
    if answer is None or answer.used == NOT_GIVEN_64 or answer.total in (0, NOT_GIVEN_64):
        return None
    reserved = 0 if version is None else answer.reserved
    return MemoryInfo(usable_mib=(answer.total - reserved) // MIB, used_mib=-(-answer.used // MIB))


def _memory_version(nvml: Nvml, handle: Any) -> int | None:
    version: int | None = getattr(nvml, "nvmlMemory_v2", None)
    if version is None or not offers(nvml, "nvmlDeviceGetMemoryInfo", handle, version):
        return None
    return version
