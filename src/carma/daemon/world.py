"""Which world the daemon runs in: this machine's GPUs or made-up ones. The rest of the daemon does not know."""

from __future__ import annotations

from typing import NamedTuple

from carma.config import Settings
from carma.core.ports import Sampler
from carma.paths import Paths


class World(NamedTuple):
    sampler: Sampler
    speed: float  # of the daemon's clock
    environment: dict[str, str]  # what every task finds in its environment beside the submitter's


def open_world(settings: Settings, paths: Paths) -> World:
    """Raises, with a hint to virtual GPUs, when there is no GPU to work with."""
    if settings.virtual.gpus > 0:
        return _virtual(settings, paths)
    from carma.monitor.nvml import open_nvml  # loads the driver's library

    return World(open_nvml(), 1.0, {})


def _virtual(settings: Settings, paths: Paths) -> World:
    from carma.vgpu import world
    from carma.vgpu.device import DIRECTORY_VARIABLE
    from carma.vgpu.sampler import VirtualSampler

    virtual = settings.virtual
    directory = str(paths.vgpu_dir / "devices")  # open to the tasks of all users; what is around it is not
    device = world.ensure(directory, virtual.gpus, virtual.gpu_memory_mib, virtual.speed)
    return World(VirtualSampler(device), virtual.speed, {DIRECTORY_VARIABLE: directory})
