"""Which world the daemon runs in: this machine's GPUs or made-up ones. The rest of the daemon does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from carma.config import Settings
from carma.core.model.values import Gpu
from carma.core.ports import Confiner, Sampler
from carma.errors import BadSettings
from carma.paths import Paths


class World(NamedTuple):
    sampler: Sampler
    speed: float  # of the daemon's clock
    environment: dict[str, str]  # what every task finds in its environment beside the submitter's
    confiner: Confiner | None = None  # None: that of cards and MIG instances
    trials: bool = True  # whether a trial run of a command can tell anything: stand-ins for tasks have no tensors


def open_world(settings: Settings, paths: Paths) -> World:
    """Raises, with a hint to virtual GPUs, when there is no GPU to work with."""
    if settings.virtual.gpus > 0:
        return _virtual(settings, paths)
    from carma.monitor.nvml import open_nvml  # loads the driver's library

    return World(open_nvml(), 1.0, {})


def check_listed(names: Sequence[str], gpus: Sequence[Gpu]) -> None:
    """`placement.gpus` against the GPUs there are: one that names none of them keeps tasks waiting."""
    known = {name for gpu in gpus for name in (gpu.id, str(gpu.index))}
    wrong = [repr(name) for name in names if name not in known]
    if wrong:
        there = ", ".join(f"{gpu.index} ({gpu.id})" for gpu in gpus) or "none"
        raise BadSettings(
            f"placement.gpus names {', '.join(wrong)}, and this server has no such GPU",
            f"the GPUs of this server, by index and UUID: {there}",
        )


def _virtual(settings: Settings, paths: Paths) -> World:
    from carma.vgpu import virtual_server as world
    from carma.vgpu.device import DIRECTORY_VARIABLE
    from carma.vgpu.sampler import VirtualSampler

    virtual = settings.virtual
    directory = str(paths.vgpu_dir / "devices")  # open to the tasks of all users; what is around it is not
    device = world.ensure(directory, virtual.gpus, virtual.gpu_memory_mib, virtual.speed)
    environment = {DIRECTORY_VARIABLE: directory}
    confiner = world.VirtualConfiner(settings.rules.sharing)
    return World(VirtualSampler(device), virtual.speed, environment, confiner, trials=False)
