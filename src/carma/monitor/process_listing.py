"""The processes on one GPU, as the driver lists them. Their attempts are not looked up here.

The SM activity of single processes is left out: NVML's per-process utilisation lists only one of two time-sliced
processes, and under MPS the server in place of its clients (both seen on an H200, driver 580).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carma import procfs
from carma.core.model.values import ProcessUse
from carma.monitor.gpu_faults import MIB, NOT_GIVEN_64, Nvml, ask, offers
from carma.monitor.query_intervals import Cached

# Versions of one function, newest first; the driver has one of them (R510, R470). MPS clients are on this list, each
# with its own memory, beside the MPS server (seen on an H200, driver 580), so NVML's list of MPS clients is not
# queried.
COMPUTE = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
GRAPHICS = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")
GRAPHICS_S = 10.0  # processes that draw (an X server) rarely change, and use little memory


def is_offered(nvml: Nvml, handle: Any) -> bool:
    return any(offers(nvml, version, handle) for version in COMPUTE)


class ProcessList:
    """The list of one GPU. `own_pid` turns a pid of the driver into one of this machine (see `translation`)."""

    def __init__(
        self,
        nvml: Nvml,
        handle: Any,
        monotonic: Callable[[], float],
        *,
        name: Callable[[int], str],
        own_pid: Callable[[int], int],
    ) -> None:
        self._nvml, self._handle = nvml, handle
        self._name, self._own_pid = name, own_pid
        self._graphics = Cached(lambda: _sums(_list(nvml, GRAPHICS, handle) or ()), GRAPHICS_S, monotonic)
        self._known: dict[int, tuple[int, str]] = {}  # the driver's pid -> ours, and the name, at the last reading

    def read(self) -> tuple[ProcessUse, ...] | None:
        """Every process once. None if the list of computing processes is not available.

        A process that computes and draws is on both lists, with all of its memory on each.
        """
        entries = _list(self._nvml, COMPUTE, self._handle)
        if entries is None:
            return None
        memory_mib = _sums(entries)
        for pid, used_mib in self._graphics.get().items():
            if memory_mib.get(pid) is None:
                memory_mib[pid] = used_mib
        self._known = {pid: self._known.get(pid) or self._look_up(pid) for pid in memory_mib}
        return tuple(
            ProcessUse(pid=self._known[pid][0], memory_mib=memory_mib[pid], name=self._known[pid][1])
            for pid in sorted(memory_mib)
        )

    def _look_up(self, pid: int) -> tuple[int, str]:
        own = self._own_pid(pid)
        return own, self._name(own)


def process_name(pid: int) -> str:
    """The kernel's short name of a process; empty if it has ended or is hidden from this user."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _list(nvml: Nvml, versions: tuple[str, ...], handle: Any) -> Any:
    for version in versions:
        if (entries := ask(nvml, version, handle)) is not None:
            return entries
    return None


def _sums(entries: Any) -> dict[int, int | None]:
    """MiB of each process; a process with several contexts has several entries. None: not available."""
    sums: dict[int, int | None] = {}
    for entry in entries:
        used, before = entry.usedGpuMemory, sums.get(entry.pid)
        given = used is not None and used != NOT_GIVEN_64
        sums[entry.pid] = (before or 0) + -(-used // MIB) if given else before
    return sums


# Pids of the driver in this process's pid namespace.
#
# A daemon on the host sees every container's processes under the pids that the driver names. Inside a container there
# are two cases. Newer drivers (R5xx) name processes by the pids of the caller's namespace. Older ones name them by
# the host's: such a pid has no meaning here, and may even be the pid of another process. If the host's /proc is
# mounted in the container (HOST_PROC names it, as for other monitors), the kernel gives each process's pid in every
# namespace (the NSpid line of proc(5)), ours included. Without it a process that the driver names by a host's pid
# cannot be identified and counts as foreign. The same holds for a task's container that a container service started
# (`docker run`): it is no descendant of the task.

PROC = Path("/proc")


def same_pid(pid: int) -> int:
    return pid


def translation(environment: Mapping[str, str], proc: Path = PROC) -> Callable[[int], int]:
    """Function from the driver's pids to ours: `same_pid` unless this is a namespace and the host's /proc can be
    read."""
    given = environment.get("HOST_PROC")
    if not given or Path(given) == proc:
        return same_pid
    host = Path(given)
    ours, outside = pids_of("self", proc), pids_of("self", host)
    depth = len(outside) - len(ours)
    if not ours or depth <= 0:
        return same_pid
    return lambda pid: pid if has_card_open(pid, proc) else _inside(host, pid, depth)


def pids_of(process: int | str, proc: Path = PROC) -> tuple[int, ...]:
    """Pids of a process, from the namespace that `proc` shows to the innermost; empty if it has ended or the kernel is
    old."""
    return tuple(int(word) for word in procfs.status_field(process, b"NSpid", str(proc)))


def has_card_open(pid: int, proc: Path = PROC) -> bool:
    """Whether a process of this namespace has that pid and an NVIDIA card open: then the pid needs no translation."""
    try:
        return any(path.startswith("/dev/nvidia") for path in procfs.open_files(pid, str(proc)))
    except OSError:
        return False


def _inside(host: Path, pid: int, depth: int) -> int:
    """Our pid of a host's process. A process outside our namespace gets a negative pid, which no process here has."""
    pids = pids_of(pid, host)
    return pids[depth] if len(pids) > depth else -pid
