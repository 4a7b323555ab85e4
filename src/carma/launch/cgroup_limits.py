"""Memory limits that the driver itself holds a cgroup to: the one rung that no process of a task can get around.

What there is: drivers from 615 on (CUDA 13.4) keep account of the device memory of each cgroup, and NVML sets a hard
limit for one (nvmlDeviceSetMemoryLimits_v1; NVIDIA's MPS documentation, "MPS v3 Memory Partitioning"). An allocation
beyond it fails as out of memory. It needs cgroup version 2 and root, and does not apply to MIG instances. Behind it is
the kernel's dmem controller (Linux 6.14 and newer) or, without that, the driver's own account. The dmem files must not
be written by hand: NVML knows the card's key in them and keeps the levels above in step; so they are only looked at.

What was never tried: this file on such a driver. It follows the documentation and the types of NVML 13.615, is tested
on a tree of files with a driver that is played, and believes in no limit that it cannot read back.

A task under such a limit is shown the limit as the size of its card. A framework's limit that is a *fraction* of the
card would then be a fraction of the limit: the two must not be given together.

The cgroups are those of launch/attempt_cgroups.py. Where the kernel's dmem is handed
down to tasks that way, a recent systemd (pull request 41304) may not be able to start the daemon again before they have
ended (EBUSY: it starts it in the unit's own cgroup first). Not tried either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from carma.core.model.values import Gpu, GpuId, Guard
from carma.core.ports import LaunchOrder
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.procfs import read_bytes

FIRST_DRIVER = 615
MIB = 2**20
_NO_SOFT_LIMIT = 0  # a guaranteed share is the ledger's business; and MPS ends tasks for the sake of those


class LimitFailed(Exception):
    """The driver would not set the limit, or tells another one than was set. Nobody but this file meets it."""


class Limiter(Protocol):
    """The driver's side."""

    def missing(self) -> str | None:
        """Why there are no such limits; None when there are."""
        ...

    def set_limit(self, gpu: GpuId, cgroup: str, limit_bytes: int) -> None:
        """Raises LimitFailed."""
        ...

    def limit(self, gpu: GpuId, cgroup: str) -> int:
        """The hard limit as the driver has it, in bytes. Raises LimitFailed."""
        ...


class NvmlLimiter:
    def __init__(self, nvml: Any) -> None:
        """`nvml` is the pynvml module, initialised, or one that behaves like it."""
        self._nvml = nvml

    def missing(self) -> str | None:
        try:
            version = str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError as error:
            return f"the driver does not answer: {error}"
        major = version.partition(".")[0]
        if not major.isdigit() or int(major) < FIRST_DRIVER:
            return f"driver {version} has none; those from {FIRST_DRIVER} on do"
        if not hasattr(self._nvml, "nvmlDeviceSetMemoryLimits_v1"):
            return "the nvidia-ml-py that is installed is too old for them; 13.615 and newer have them"
        return None

    def set_limit(self, gpu: GpuId, cgroup: str, limit_bytes: int) -> None:
        asked = self._nvml.c_nvmlSetMemoryLimits_v1_t()
        asked.nameSpace, asked.softLimit, asked.hardLimit = os.fsencode(cgroup), _NO_SOFT_LIMIT, limit_bytes
        try:
            self._nvml.nvmlDeviceSetMemoryLimits_v1(self._handle(gpu), asked)
        except self._nvml.NVMLError as error:
            raise LimitFailed(f"the driver sets no limit for {cgroup} on {gpu}: {error}") from error

    def limit(self, gpu: GpuId, cgroup: str) -> int:
        answer = self._nvml.c_nvmlGetMemoryLimits_v1_t()
        answer.nameSpace = os.fsencode(cgroup)
        try:
            self._nvml.nvmlDeviceGetMemoryLimits_v1(self._handle(gpu), answer)
        except self._nvml.NVMLError as error:
            raise LimitFailed(f"the driver tells no limit for {cgroup} on {gpu}: {error}") from error
        return int(answer.hardLimit)

    def _handle(self, gpu: GpuId) -> Any:
        return self._nvml.nvmlDeviceGetHandleByUUID(gpu)


class CgroupLimits:
    """Limits the cgroup of an attempt. The runner joins it before it starts the command, so that whatever the command
    starts is in it too. The runner may stay in it: it uses no GPU."""

    def __init__(self, limiter: Limiter, groups: AttemptCgroups) -> None:
        self._limiter = limiter
        self._groups = groups

    @classmethod
    def find(cls, limiter: Limiter, gpus: Sequence[Gpu], groups: AttemptCgroups | str) -> CgroupLimits | str:
        """Or a sentence that says why there are none. `groups` is the answer to where cgroups can be created."""
        if not any(gpu.kind == "card" for gpu in gpus):
            return "limits for cgroups need a whole card"
        missing = limiter.missing()
        if missing is not None:
            return f"no memory limits for cgroups: {missing}"
        if isinstance(groups, str):
            return f"no memory limits for cgroups: {groups}"
        if groups.cgroups.version != 2:
            return "no memory limits for cgroups: they need cgroup version 2"
        if os.geteuid() != 0:
            return "no memory limits for cgroups: only root may set them"
        problem = _enable(groups.cgroups.bases[""])
        return cls(limiter, groups) if problem is None else f"no memory limits for cgroups: {problem}"

    def guard(self, order: LaunchOrder, cap_mib: int) -> Guard | None:
        """Limits the attempt's cgroup on each of its GPUs; None where that fails."""
        if not order.gpus or any(gpu.kind != "card" for gpu in order.gpus):
            return None
        try:
            (path,) = self._groups.create(order.key).directories  # the same order may come twice
            for gpu in order.gpus:
                self._limit(gpu.id, path, cap_mib * MIB)
        except (OSError, LimitFailed):
            self._groups.remove(order.key)
            return None
        return Guard(rung="cgroup", limit_mib=cap_mib, how="the driver's limit on its cgroup")

    def _limit(self, gpu: GpuId, path: str, limit_bytes: int) -> None:
        self._limiter.set_limit(gpu, path, limit_bytes)
        if not 0 < self._limiter.limit(gpu, path) <= limit_bytes:
            raise LimitFailed(f"the driver does not keep the limit for {path} on {gpu}")


def _enable(base: str) -> str | None:
    """Cgroups below it must have the dmem controller, where the kernel has it; None, or why that cannot be."""
    if "dmem" not in _words(os.path.join(base, "cgroup.controllers")):
        return None  # the driver's own account, which needs no files
    control = os.path.join(base, "cgroup.subtree_control")
    if "dmem" in _words(control):
        return None
    try:
        with open(control, "w") as file:
            file.write("+dmem")
    except OSError as error:
        # EBUSY: a cgroup with processes of its own cannot hand controllers down.
        return f"the kernel's dmem controller cannot be used below {base}: {error.strerror}"
    return None


def _words(path: str) -> list[str]:
    return read_bytes(path).decode("ascii", "replace").split()
