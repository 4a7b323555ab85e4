"""The GPUs of the daemon: those of this machine, or virtual ones. The rest of the daemon does not know which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from carma.config import Settings
from carma.core.model.values import Gpu
from carma.core.ports import Confiner, Sampler
from carma.errors import BadSettings
from carma.paths import Paths


class GpuSource(NamedTuple):
    sampler: Sampler
    speed: float  # of the daemon's clock
    environment: dict[str, str]  # added to the environment of every task
    confiner: Confiner | None  # None: that of cards and MIG instances
    trials: bool  # whether trial runs are useful: the programs of simulated tasks have no tensors


def open_gpus(settings: Settings, paths: Paths) -> GpuSource:
    """Raises NoGpus, with a hint to virtual GPUs."""
    virtual = settings.virtual
    if virtual.gpus == 0:
        from carma.monitor.nvml import open_nvml  # loads the driver's library

        return GpuSource(open_nvml(), 1.0, {}, None, trials=True)
    from carma.vgpu import virtual_server
    from carma.vgpu.device import DIRECTORY_VARIABLE
    from carma.vgpu.sampler import VirtualSampler

    directory = str(paths.vgpu_dir / "devices")  # tasks of all users write there, but not in its parent
    device = virtual_server.ensure(directory, virtual.gpus, virtual.gpu_memory_mib, virtual.speed)
    environment = {DIRECTORY_VARIABLE: directory}
    confiner = virtual_server.VirtualConfiner(settings.rules.sharing)
    return GpuSource(VirtualSampler(device), virtual.speed, environment, confiner, trials=False)


def check_listed(names: Sequence[str], gpus: Sequence[Gpu]) -> None:
    """Raises BadSettings if `placement.gpus` names a GPU that does not exist: tasks would wait for it."""
    known = {name for gpu in gpus for name in (gpu.id, str(gpu.index))}
    wrong = [repr(name) for name in names if name not in known]
    if wrong:
        present = ", ".join(f"{gpu.index} ({gpu.id})" for gpu in gpus) or "none"
        raise BadSettings(
            f"placement.gpus names {', '.join(wrong)}, and this server has no such GPU",
            f"the GPUs of this server, by index and UUID: {present}",
        )
