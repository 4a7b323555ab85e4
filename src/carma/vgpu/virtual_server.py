"""The virtual GPUs of a server.

1. A world of virtual GPUs is made or reopened, so that a restarted daemon finds its GPUs and running tasks.
2. `VirtualConfiner` decides how tasks share virtual GPUs.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress

from carma import procfs
from carma.core.model.settings import Sharing
from carma.core.model.units import show_count
from carma.core.model.values import Confinement, Guard
from carma.core.ports import Arranged, LaunchOrder
from carma.errors import BadSettings, StoreError
from carma.vgpu.device import LIMIT_VARIABLE, Device, reap, share_lock
from carma.vgpu.device_state import VirtualGpu, VirtualWorld, advance


def create(directory: str, gpus: int, memory_mib: int, speed: float = 1.0, *, shared: bool | None = None) -> Device:
    """A new world; it replaces an existing one in the directory. `shared`: open to every user (default: if made by
    root)."""
    if gpus < 1 or memory_mib < 1 or not 0.0 < speed < 1e6:
        raise BadSettings(
            f"virtual GPUs cannot be {gpus} of {memory_mib} MiB at speed {speed:g}",
            "Give at least one GPU, at least 1 MiB and a speed above 0.",
        )
    shared = os.geteuid() == 0 if shared is None else shared
    name = f"Virtual GPU {memory_mib / 1024:g} GiB" if memory_mib >= 1024 else f"Virtual GPU {memory_mib} MiB"
    cards = [VirtualGpu(id=gpu_uuid(index), index=index, name=name, memory_mib=memory_mib) for index in range(gpus)]
    now_s, boot = time.monotonic(), procfs.boot_id()
    world = VirtualWorld(boot=boot, origin_s=now_s, epoch_s=time.time(), speed=speed, shared=shared, gpus=cards)
    os.makedirs(directory, exist_ok=True)
    os.chmod(directory, 0o777 if shared else 0o700)
    if shared:
        share_lock(directory)
    device = Device(directory)
    device.start(world)
    return device


def reopen(directory: str, speed: float | None = None) -> Device:
    """An existing world. Its time continues, also after a reboot and at another speed."""
    device = Device(directory)
    with device.changing() as world:
        if world.boot != procfs.boot_id():
            world.processes = []
            world.boot = procfs.boot_id()
            world.epoch_s = max(world.epoch_s, time.time() - world.at_s)
            _rebase(world, speed or world.speed)
        elif speed is not None and speed != world.speed:
            _rebase(world, speed)
    return device


def ensure(directory: str, gpus: int, memory_mib: int, speed: float = 1.0) -> Device:
    """The world with these GPUs: the existing one in the directory or, if its GPUs differ, a new one.

    A world with other GPUs is replaced only if no process uses it.
    """
    device = Device(directory)
    world = None
    with suppress(StoreError):  # cut short by a power failure: no process can use it
        world = device.read() if device.exists() else None
    if world is None:
        return create(directory, gpus, memory_mib, speed)
    wanted = [(gpu_uuid(index), memory_mib) for index in range(gpus)]
    if [(gpu.id, gpu.memory_mib) for gpu in world.gpus] == wanted:
        return reopen(directory, speed)
    reap(world)
    if world.processes and world.boot == procfs.boot_id():
        raise _in_use(world, gpus, memory_mib)
    return create(directory, gpus, memory_mib, speed)


def _in_use(world: VirtualWorld, gpus: int, memory_mib: int) -> BadSettings:
    """Tasks of an earlier daemon still run on other virtual GPUs than the wanted ones."""
    used = show_count(len(world.gpus), "virtual GPU")
    pids = ", ".join(str(process.pid) for process in world.processes)
    some = "process" if len(world.processes) == 1 else "processes"
    had_mib = world.gpus[0].memory_mib
    return BadSettings(
        f"cannot start with {show_count(gpus, 'virtual GPU')} of {_size(memory_mib)}: {used} of {_size(had_mib)} are "
        f"still in use by {some} {pids} of an earlier daemon",
        f"go on with: carma up --virtual-gpus {len(world.gpus)} --gpu-memory {_size(had_mib)}; or end the {some} first",
    )


def _size(memory_mib: int) -> str:
    """A size as `--gpu-memory` accepts it."""
    return f"{memory_mib}MiB" if memory_mib % 1024 else f"{memory_mib // 1024}GiB"


class VirtualConfiner:
    """core.ports.Confiner for virtual GPUs, which enforce the memory limit themselves and have no MPS."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def arrange(self, order: LaunchOrder) -> Arranged:
        booking = order.placement.booking
        if not order.placement.gpus:
            return Arranged(confinement=Confinement(mechanism="timeslice"))
        cap_mib = None if booking.alone else booking.cap_mib
        guards = (
            [] if cap_mib is None else [Guard(rung="framework", limit_mib=cap_mib, how="the virtual GPU's own limit")]
        )
        confinement = Confinement(
            mechanism="timeslice",
            guards=(*guards, *self._sharing.watchdog_guards(booking)),
            note=self._note(order),
        )
        return Arranged(confinement=confinement, environment={} if cap_mib is None else {LIMIT_VARIABLE: str(cap_mib)})

    def _note(self, order: LaunchOrder) -> str:
        notes = []
        if (order.spec.mechanism or self._sharing.mechanism) == "mps":
            notes.append("virtual GPUs have no MPS")
        if order.spec.threads_percent is not None:
            notes.append("its share of the SMs is not limited: only MPS limits it")
        return "; ".join(notes)


def gpu_uuid(index: int) -> str:
    """Equal for equal indices everywhere, so that a new world has the same GPUs."""
    return f"VGPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'carma virtual GPU {index}')}"


def _rebase(world: VirtualWorld, speed: float) -> None:
    """Change the speed from now on, without a jump of the time."""
    if world.boot == procfs.boot_id():
        advance(world, world.virtual_s(time.monotonic()))
    world.speed = speed
    world.origin_s = time.monotonic() - world.at_s / speed
