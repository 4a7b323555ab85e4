"""The GPUs that tasks can use, and how each of them is read.

A card in MIG mode is not a GPU here; its instances are. Modes are read and never changed. If an administrator put
several compute instances into one GPU instance, each is a GPU here, and all show the memory and the activity that they
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities, Gpu, GpuId, GpuSample
from carma.monitor import gpm, utilisation
from carma.monitor import process_listing as listing
from carma.monitor.gpu_faults import MIB, NOT_GIVEN_32, NOT_GIVEN_64, GpuLost, Nvml, ask, offers
from carma.monitor.query_intervals import Cached, EnergyCounter

UTILISATION_S = 5.0  # interval of the coarse utilisation, which is only shown if a better figure exists


class ActivityReader(Protocol):
    """One source of activity for one GPU. `capabilities` names its figures and the source."""

    @property
    def capabilities(self) -> Capabilities: ...

    def read(self) -> Activity:
        """Raises GpuLost and DriverGone; a missing figure is None."""
        ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """A GPU by names that outlive handles: the UUID of its card and, in MIG mode, the number of its GPU instance."""

    card: GpuId
    instance: int | None = None


class Environment(NamedTuple):
    """What reading a GPU needs besides NVML."""

    monotonic: Callable[[], float]
    process_name: Callable[[int], str]
    own_pid: Callable[[int], int]
    engine_s: float = gpm.ENGINE_S
    measured: bool = True  # False: no counters of SM activity are read


class GpuDevice:
    """A GPU with its handle. The handle is valid as long as the driver; the UUID is permanent.

    `memory_version` None: the first version, which counts the driver's own memory as used. `reader` None: coarse
    utilisation only.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpu: Gpu,
        found: _Found,
        environment: Environment,
        memory_version: int | None,
        reader: ActivityReader | None,
    ) -> None:
        self.gpu, self.place, self.reader = gpu, found.place, reader
        self._nvml, self._handle, self._memory_version = nvml, found.handle, memory_version
        can, monotonic = gpu.capabilities, environment.monotonic
        self._energy = EnergyCounter(nvml, found.handle, monotonic) if can.energy else None
        self._processes: listing.ProcessList | None = None
        if can.processes:
            names, own_pid = environment.process_name, environment.own_pid
            self._processes = listing.ProcessList(nvml, found.handle, monotonic, name=names, own_pid=own_pid)
        valid_s = 0.0 if reader is None else UTILISATION_S
        self._utilisation = Cached(lambda: _utilisation(nvml, found.handle), valid_s, monotonic)

    def sample(self, at: float) -> GpuSample:
        """Figures that the capabilities do not name are not queried and stay None. Raises GpuLost and DriverGone."""
        memory = self.sample_memory(at)  # first: it shows whether the card answers at all
        power_w = _power_w(self._nvml, self._handle) if self.gpu.capabilities.power else None
        utilisation = self._utilisation.get()
        return replace(
            memory,
            activity=self.reader.read() if self.reader is not None else NO_ACTIVITY,
            gpu_util=utilisation.gpu,
            memory_util=utilisation.memory,
            power_w=power_w,
            energy_j=None if self._energy is None else self._energy.read(power_w),
        )

    def sample_memory(self, at: float) -> GpuSample:
        """Memory and processes only. Raises GpuLost and DriverGone."""
        memory = ask_memory(self._nvml, self._handle, self._memory_version)
        return GpuSample(
            gpu=self.gpu.id,
            at=at,
            memory_used_mib=None if memory is None else memory.used_mib,
            processes=None if self._processes is None else self._processes.read(),
        )

    def use(self, reader: ActivityReader) -> None:
        """Take activity from a better source."""
        self.close()
        self.reader = reader
        self.gpu = replace(self.gpu, capabilities=_with_activity(self.gpu.capabilities, reader))

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


@dataclass(slots=True)
class Devices:
    """`answering` are the cards that could be read completely; `problems` name the ones that tasks cannot use."""

    found: list[GpuDevice] = field(default_factory=list)
    answering: set[GpuId] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class _Found(NamedTuple):
    """A GPU that was not queried yet."""

    handle: Any
    card_handle: Any
    place: Place


def find(nvml: Nvml, environment: Environment) -> Devices:
    """Query every card. One that does not answer is a problem, and does not prevent the others from being found.

    Cards have NVML's index (PCI order, as in nvidia-smi); MIG instances are numbered after the last card.
    """
    devices = Devices()
    cards = ask(nvml, "nvmlDeviceGetCount") or 0
    instances = count(cards)
    for index in range(cards):
        try:
            for found in _places(nvml, index, devices):
                _add(nvml, index if found.place.instance is None else next(instances), found, environment, devices)
        except GpuLost as error:
            devices.problems.append(f"GPU {index} cannot be used: it does not answer: {error}")
    devices.found.sort(key=lambda device: device.gpu.index)
    return devices


def _places(nvml: Nvml, index: int, devices: Devices) -> Iterator[_Found]:
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
        yield _Found(handle, handle, Place(card))
        return
    instances = mig_instances(nvml, handle)
    with_ids = [(one, ask(nvml, "nvmlDeviceGetGpuInstanceId", one)) for one in instances]
    devices.answering.add(card)
    if not any(instance is not None for _, instance in with_ids):
        devices.problems.append(f"GPU {index} cannot be used: it is in MIG mode and has no instances")
    for mig_handle, instance in with_ids:
        if instance is not None:
            yield _Found(mig_handle, handle, Place(card, instance))


def mig_instances(nvml: Nvml, card: Any) -> list[Any]:
    """Handles of the card's MIG devices. Their numbering has holes."""
    most = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0
    handles = (ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, number) for number in range(most))
    return [handle for handle in handles if handle is not None]


def _add(nvml: Nvml, index: int, found: _Found, environment: Environment, devices: Devices) -> None:
    try:
        device = _device(nvml, index, found, environment)
        problem = "it does not tell its UUID or its memory"
    except GpuLost as error:
        device, problem = None, f"it does not answer: {error}"
    if device is None:
        devices.answering.discard(found.place.card)
        devices.problems.append(f"GPU {index} cannot be used: {problem}")
    else:
        devices.found.append(device)


def _device(nvml: Nvml, index: int, found: _Found, environment: Environment) -> GpuDevice | None:
    handle, place = found.handle, found.place
    uuid = place.card if place.instance is None else ask(nvml, "nvmlDeviceGetUUID", handle)
    version = _memory_version(nvml, handle)
    memory = ask_memory(nvml, handle, version)
    if uuid is None or memory is None:
        return None
    limit_w = _power_w(nvml, handle, "nvmlDeviceGetEnforcedPowerLimit") if place.instance is None else None
    inferable = (
        limit_w is not None and _utilisation(nvml, handle).gpu is not None and _power_w(nvml, handle) is not None
    )
    reader = _reader(nvml, found, environment, inferable)
    gpu = Gpu(
        id=GpuId(uuid),
        index=index,
        name=ask(nvml, "nvmlDeviceGetName", handle) or "unknown GPU",
        memory_mib=memory.usable_mib,
        kind="card" if place.instance is None else "mig",
        capabilities=_capabilities(nvml, handle, reader, inferable),
        power_limit_w=limit_w,
    )
    return GpuDevice(nvml, gpu, found, environment, version, reader)


def _reader(nvml: Nvml, found: _Found, environment: Environment, inferable: bool) -> ActivityReader | None:
    """The best source of NVML itself; None also where inference from the other figures is better. DCGM, which is better
    than all but GPM, is added by the sampler."""
    if environment.measured and gpm.is_offered(nvml, found.card_handle):
        instance, engine_s = found.place.instance, environment.engine_s
        reader = gpm.GpmReader(nvml, found.card_handle, instance, environment.monotonic, engine_s)
        if reader.offered:
            return reader
        reader.close()
    if not inferable and utilisation.is_offered(nvml, found.handle):
        return utilisation.UtilisationReader(nvml, found.handle, environment.monotonic)
    return None


def _capabilities(nvml: Nvml, handle: Any, reader: ActivityReader | None, inferable: bool) -> Capabilities:
    can = Capabilities(
        power=offers(nvml, "nvmlDeviceGetPowerUsage", handle),
        energy=offers(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle),
        processes=listing.is_offered(nvml, handle),
        source="inferred" if inferable else "nvml",
    )
    return can if reader is None else _with_activity(can, reader)


def _with_activity(before: Capabilities, reader: ActivityReader) -> Capabilities:
    return replace(before, metrics=reader.capabilities.metrics, source=reader.capabilities.source)


class MemoryInfo(NamedTuple):
    usable_mib: int  # without the memory that the driver reserves for itself
    used_mib: int


def ask_memory(nvml: Nvml, handle: Any, version: int | None) -> MemoryInfo | None:
    """The heartbeat: every working card answers it, or refuses it as not offered.

    The second version separates the driver's own memory; the first counts it as used.
    """
    arguments = (handle,) if version is None else (handle, version)
    answer = ask(nvml, "nvmlDeviceGetMemoryInfo", *arguments, heartbeat=True)
    if answer is None or answer.used == NOT_GIVEN_64 or answer.total in (0, NOT_GIVEN_64):
        return None
    reserved = 0 if version is None else answer.reserved
    return MemoryInfo(usable_mib=(answer.total - reserved) // MIB, used_mib=-(-answer.used // MIB))


def _memory_version(nvml: Nvml, handle: Any) -> int | None:
    version: int | None = getattr(nvml, "nvmlMemory_v2", None)
    return version if version is not None and offers(nvml, "nvmlDeviceGetMemoryInfo", handle, version) else None


class Utilisation(NamedTuple):
    """Shares of time with any kernel (97 % at 25 % SM activity: two small tasks, H200) and with any memory access."""

    gpu: float | None = None
    memory: float | None = None


def _utilisation(nvml: Nvml, handle: Any) -> Utilisation:
    rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    if rates is None:
        return Utilisation()
    return Utilisation(*(None if percent > 100 else percent / 100.0 for percent in (rates.gpu, rates.memory)))


def _power_w(nvml: Nvml, handle: Any, function: str = "nvmlDeviceGetPowerUsage") -> float | None:
    milliwatts = ask(nvml, function, handle)
    return None if milliwatts is None or milliwatts == NOT_GIVEN_32 else milliwatts / 1000.0
