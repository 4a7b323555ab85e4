"""Pids of the driver in this process's pid namespace.

A daemon on the host sees every container's processes under the pids that the driver names. Inside a container there are
two cases. Newer drivers (R5xx) name processes by the pids of the caller's namespace. Older ones name them by the
host's: such a pid has no meaning here, and may even be the pid of another process. If the host's /proc is mounted in
the container (HOST_PROC names it, as for other monitors), the kernel gives each process's pid in every namespace (the
NSpid line of proc(5)), ours included. Without it a process that the driver names by a host's pid cannot be identified
and counts as foreign. The same holds for a task's container that a container service started (`docker run`): it is no
descendant of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from carma import procfs

PROC = Path("/proc")


def same_pid(pid: int) -> int:
    return pid


def translation(environment: Mapping[str, str], proc: Path = PROC) -> Callable[[int], int]:
    """From the driver's pids to ours: `same_pid` unless this is a namespace and the host's /proc can be read."""
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
    """Its pids, from the namespace that `proc` shows to the innermost; empty if it has ended or the kernel is old."""
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
