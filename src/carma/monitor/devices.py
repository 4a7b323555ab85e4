"""Finding the GPUs that tasks can use, and what each of them tells about itself.

A card in MIG mode is not a GPU here; its instances are. Modes are looked at and never changed. Where an administrator
put several compute instances into one GPU instance, each is a GPU here and all show the memory and the activity that
they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from carma.core.model.values import Activity, Capabilities, Gpu, GpuId
from carma.monitor import gpm, utilisation
from carma.monitor import process_listing as listing
from carma.monitor.energy import EnergyCounter
from carma.monitor.gpu_faults import GpuLost, Nvml, ask, offers
from carma.monitor.memory_query import Held
from carma.monitor.process_listing import MIB, NOT_GIVEN_64

UTILISATION_S = 5.0  # the coarse figure is only shown where a finer one is there


class ActivityReader(Protocol):
    """One source of activity for one GPU. `capabilities` has what it gives, and its name."""

    @property
    def capabilities(self) -> Capabilities: ...

    def read(self) -> Activity:
        """Raises GpuLost and DriverGone; what is not given is None."""
        ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """A GPU by names that outlive handles: its card's UUID and, in MIG mode, the number of its GPU instance."""

    card: GpuId
    instance: int | None = None


class Means(NamedTuple):
    """What reading a GPU takes besides NVML; given by whoever opens the sampler."""

    monotonic: Callable[[], float]
    process_name: Callable[[int], str]
    own_pid: Callable[[int], int]
    engine_s: float = gpm.ENGINE_S


@dataclass(slots=True)
class Device:
    """A GPU with the handle to ask it by. The handle dies with the driver; the UUID does not."""

    gpu: Gpu
    handle: Any
    place: Place
    memory_version: int | None  # None: the first version, which counts the driver's own memory as used
    reader: ActivityReader | None  # None: nothing but the coarse utilisation
    energy: EnergyCounter | None
    processes: listing.ProcessList | None
    utilisation: Held[Any]

    def use(self, reader: ActivityReader) -> None:
        """Take activity from a better source that turned up."""
        self.close()
        self.reader = reader
        self.gpu = msgspec.structs.replace(self.gpu, capabilities=_with_activity(self.gpu.capabilities, reader))

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


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
class _Found:
    """A device before it was asked anything."""

    handle: Any
    index: int
    card_handle: Any
    place: Place


def find(nvml: Nvml, means: Means) -> Devices:
    """Ask every card. One that does not answer is a problem with a sentence, and the others are found all the same.

    Cards keep NVML's index (PCI order, as nvidia-smi shows them); MIG instances are numbered after the last card.
    """
    devices = Devices()
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    next_index = count
    for index in range(count):
        try:
            for found in _places(nvml, index, next_index, devices):
                next_index += found.place.instance is not None
                _add(nvml, found, means, devices)
        except GpuLost as error:
            devices.problems.append(f"GPU {index} cannot be used: it does not answer: {error}")
    devices.found.sort(key=lambda device: device.gpu.index)
    return devices


def _places(nvml: Nvml, index: int, next_index: int, devices: Devices) -> Iterator[_Found]:
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
        yield _Found(handle, index, handle, Place(card))
        return
    instances = _instances(nvml, handle)
    devices.answering.add(card)
    if not instances:
        devices.problems.append(f"GPU {index} cannot be used: it is in MIG mode and has no instances")
    for number, (mig_handle, instance) in enumerate(instances):
        yield _Found(mig_handle, next_index + number, handle, Place(card, instance))


def _instances(nvml: Nvml, card: Any) -> list[tuple[Any, int]]:
    """Handles of the card's MIG devices, each with the id of its GPU instance. The numbering has holes."""
    most = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0
    handles = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, number) for number in range(most)]
    with_ids = [(handle, ask(nvml, "nvmlDeviceGetGpuInstanceId", handle)) for handle in handles if handle is not None]
    return [(handle, instance) for handle, instance in with_ids if instance is not None]


def _add(nvml: Nvml, found: _Found, means: Means, devices: Devices) -> None:
    try:
        device = _device(nvml, found, means)
        problem = "it does not tell its UUID or its memory"
    except GpuLost as error:
        device, problem = None, f"it does not answer: {error}"
    if device is None:
        devices.answering.discard(found.place.card)
        devices.problems.append(f"GPU {found.index} cannot be used: {problem}")
    else:
        devices.found.append(device)


def _device(nvml: Nvml, found: _Found, means: Means) -> Device | None:
    handle, place = found.handle, found.place
    uuid = place.card if place.instance is None else ask(nvml, "nvmlDeviceGetUUID", handle)
    version = _memory_version(nvml, handle)
    memory = ask_memory(nvml, handle, version)
    if uuid is None or memory is None:
        return None
    reader = _reader(nvml, found, means)
    gpu = Gpu(
        id=GpuId(uuid),
        index=found.index,
        name=ask(nvml, "nvmlDeviceGetName", handle) or "unknown GPU",
        memory_mib=memory.usable_mib,
        kind="card" if place.instance is None else "mig",
        capabilities=_capabilities(nvml, handle, reader),
    )
    can = gpu.capabilities
    lists = listing.ProcessList(nvml, handle, means.monotonic, name=means.process_name, own_pid=means.own_pid)

    def rates() -> Any:
        return ask(nvml, "nvmlDeviceGetUtilizationRates", handle)

    return Device(
        gpu=gpu,
        handle=handle,
        place=place,
        memory_version=version,
        reader=reader,
        energy=EnergyCounter(nvml, handle, means.monotonic) if can.energy else None,
        processes=lists if can.processes else None,
        utilisation=Held(rates, 0.0 if reader is None else UTILISATION_S, means.monotonic),
    )


def _reader(nvml: Nvml, found: _Found, means: Means) -> ActivityReader | None:
    """The best that NVML itself has. DCGM, which stands between the two, is asked elsewhere and may come later."""
    if gpm.is_offered(nvml, found.card_handle):
        reader = gpm.GpmReader(nvml, found.card_handle, found.place.instance, means.monotonic, means.engine_s)
        if reader.offered:
            return reader
        reader.close()
    if utilisation.is_offered(nvml, found.handle):
        return utilisation.UtilisationReader(nvml, found.handle, means.monotonic)
    return None


def _capabilities(nvml: Nvml, handle: Any, reader: ActivityReader | None) -> Capabilities:
    around = Capabilities(
        power=offers(nvml, "nvmlDeviceGetPowerUsage", handle),
        energy=offers(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle),
        processes=listing.is_offered(nvml, handle),
        source="nvml",
    )
    return around if reader is None else _with_activity(around, reader)


def _with_activity(around: Capabilities, reader: ActivityReader) -> Capabilities:
    """What the GPU gives beside activity, and what `reader` gives of it."""
    return msgspec.structs.replace(
        reader.capabilities, power=around.power, energy=around.energy, processes=around.processes
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
