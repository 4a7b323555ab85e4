"""The cgroup of each attempt, and the driver's memory limit on it.

1. `AttemptCgroups` makes a cgroup for each attempt if the daemon may create cgroups (carma/cgroups.py). The runner
   joins it before it starts anything, and a process of another user than the daemon's cannot leave it, so all processes
   of the attempt are known. Daemons with different log directories never share a name.
2. `CgroupLimits` lets the driver limit the GPU memory of that cgroup: the only limit that no process of a task can
   avoid. Drivers from 615 on (CUDA 13.4) account the device memory of each cgroup, and NVML sets a hard limit
   (nvmlDeviceSetMemoryLimits_v1; NVIDIA's MPS documentation, "MPS v3 Memory Partitioning"). An allocation beyond it
   fails as out of memory. It needs cgroup version 2 and root, and does not apply to MIG instances. It is based on the
   kernel's dmem controller (Linux 6.14 and newer) or, without that, on the driver's own account. The dmem files must
   not be written by hand: NVML knows the card's key in them and keeps the levels above in step. They are only read.

Never tried on such a driver. The code follows the documentation and the types of NVML 13.615, is tested on a tree of
files with a scripted driver, and trusts no limit that it cannot read back. Also not tried: with dmem passed down to
tasks, a recent systemd (pull request 41304) may be unable to start the daemon again before they have ended (EBUSY: it
starts the daemon in the unit's own cgroup first).

A task under such a limit sees the limit as the size of its card. A framework's limit that is a *fraction* of the card
would then be a fraction of the limit: the two must not be combined.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

from carma.cgroups import Cgroup, Cgroups
from carma.core.model.values import AttemptKey, Gpu, GpuId, Guard, TaskId
from carma.core.ports import LaunchOrder
from carma.procfs import read_bytes

KILL_LIMIT_S = 0.5  # a process that is stuck in the kernel must not delay the launcher
FIRST_DRIVER = 615
MIB = 2**20
_NO_SOFT_LIMIT = 0  # the ledger guarantees shares; and MPS ends tasks to keep soft limits


class AttemptCgroups:
    def __init__(self, cgroups: Cgroups, log_dir: str | os.PathLike[str]) -> None:
        self.cgroups = cgroups
        digest = hashlib.blake2b(os.fsencode(os.path.abspath(log_dir)), digest_size=6).hexdigest()
        self._prefix = f"attempt-{digest}-"

    def create(self, key: AttemptKey) -> Cgroup:
        """The cgroup of this attempt, made if it does not exist. Raises OSError."""
        return self.cgroups.create(self._prefix + str(key))

    def members(self, key: AttemptKey) -> list[int]:
        return self._open(key).members()

    def kill(self, key: AttemptKey) -> None:
        self._open(key).kill(KILL_LIMIT_S)

    def freezer(self, key: AttemptKey) -> Cgroup | None:
        """The attempt's cgroup if it can freeze processes: version 2."""
        return self.cgroups.open(self._prefix + str(key)) if self.cgroups.version == 2 else None

    def remove(self, key: AttemptKey) -> None:
        """Removes the cgroup with its limits. A cgroup that still contains processes stays."""
        with contextlib.suppress(OSError):
            self._open(key).remove()

    def existing(self) -> list[AttemptKey]:
        """The attempts that have a cgroup, also those of an earlier daemon."""
        found = (re.fullmatch(re.escape(self._prefix) + r"(\d+)\.(\d+)", name) for name in self.cgroups.names())
        return [AttemptKey(TaskId(int(match[1])), int(match[2])) for match in found if match is not None]

    def _open(self, key: AttemptKey) -> Cgroup:
        """Empty if the attempt has none."""
        return self.cgroups.open(self._prefix + str(key)) or Cgroup(())


class LimitFailed(Exception):
    """This machine has no limits, the driver refused to set one, or it reports another one than was set."""


class NvmlLimiter:
    """The driver's limits, through NVML."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the pynvml module, initialised, or one that behaves like it."""
        self._nvml = nvml

    def missing(self) -> str | None:
        """Why this machine has no such limits; None if it has."""
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
        """Raises LimitFailed."""
        limits = self._nvml.c_nvmlSetMemoryLimits_v1_t()
        limits.nameSpace, limits.softLimit, limits.hardLimit = os.fsencode(cgroup), _NO_SOFT_LIMIT, limit_bytes
        try:
            self._nvml.nvmlDeviceSetMemoryLimits_v1(self._nvml.nvmlDeviceGetHandleByUUID(gpu), limits)
        except self._nvml.NVMLError as error:
            raise LimitFailed(f"the driver sets no limit for {cgroup} on {gpu}: {error}") from error

    def limit(self, gpu: GpuId, cgroup: str) -> int:
        """The hard limit that the driver reports, in bytes. Raises LimitFailed."""
        limits = self._nvml.c_nvmlGetMemoryLimits_v1_t()
        limits.nameSpace = os.fsencode(cgroup)
        try:
            self._nvml.nvmlDeviceGetMemoryLimits_v1(self._nvml.nvmlDeviceGetHandleByUUID(gpu), limits)
        except self._nvml.NVMLError as error:
            raise LimitFailed(f"the driver reports no limit for {cgroup} on {gpu}: {error}") from error
        return int(limits.hardLimit)


class CgroupLimits:
    """Limits the cgroup of an attempt. The runner is in it too; it uses no GPU."""

    def __init__(self, limiter: NvmlLimiter, groups: AttemptCgroups) -> None:
        self._limiter = limiter
        self._groups = groups

    @classmethod
    def find(cls, limiter: NvmlLimiter, gpus: Sequence[Gpu], groups: AttemptCgroups) -> CgroupLimits:
        """Raises LimitFailed with the reason if there are none."""
        if not any(gpu.kind == "card" for gpu in gpus):
            raise LimitFailed("they need a whole card: MIG instances have none")
        if (problem := limiter.missing()) is not None:
            raise LimitFailed(problem)
        if groups.cgroups.version != 2:
            raise LimitFailed("they need cgroup version 2")
        if os.geteuid() != 0:
            raise LimitFailed("only root may set them")
        _enable(groups.cgroups.bases[""])
        return cls(limiter, groups)

    def guard(self, order: LaunchOrder, cap_mib: int) -> Guard | None:
        """Limits the attempt's cgroup on each of its GPUs; None if that fails."""
        if not order.gpus or any(gpu.kind != "card" for gpu in order.gpus):
            return None
        try:
            (path,) = self._groups.create(order.key).directories  # the same order may come twice
            for gpu in order.gpus:
                self._limiter.set_limit(gpu.id, path, cap_mib * MIB)
                if not 0 < self._limiter.limit(gpu.id, path) <= cap_mib * MIB:
                    raise LimitFailed(f"the driver does not keep the limit for {path} on {gpu.id}")
        except (OSError, LimitFailed):
            self._groups.remove(order.key)
            return None
        return Guard(rung="cgroup", limit_mib=cap_mib, how="the driver's limit on its cgroup")


def _enable(base: str) -> None:
    """Enable the dmem controller for the cgroups below, if the kernel has it. Raises LimitFailed."""
    control = os.path.join(base, "cgroup.subtree_control")
    if "dmem" not in _words(os.path.join(base, "cgroup.controllers")) or "dmem" in _words(control):
        return  # without the controller the driver has an account of its own
    try:
        with open(control, "w") as file:
            file.write("+dmem")
    except OSError as error:
        # EBUSY: a cgroup that contains processes cannot pass controllers down.
        raise LimitFailed(f"the kernel's dmem controller cannot be used below {base}: {error.strerror}") from error


def _words(path: str) -> list[str]:
    return read_bytes(path).decode("ascii", "replace").split()
