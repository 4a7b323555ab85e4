"""Processes as /proc shows them: identity, parents, sessions, and signals to exactly one process.

A process is identified by its pid *and* its start time (in clock ticks since the boot), because pids are reused. The
functions raise OSError when descriptors or memory run out: a process that cannot be read has not ended. Standard
library only: programs started with `python -I -S` import this module.
"""

from __future__ import annotations

import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STOPPED = "Tt"  # states of a stopped process
FROZEN_CGROUP = b"/paused"
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class Process:
    __slots__ = ("parent", "pid", "session", "start_ticks", "state")

    def __init__(self, pid: int, state: str, parent: int, session: int, start_ticks: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.session = session
        self.start_ticks = start_ticks

    @property
    def ended(self) -> bool:
        """A zombie, or about to vanish: it holds no resources."""
        return self.state in "ZXx"


def read_bytes(path: str, limit: int = 65536) -> bytes:
    """The start of a file; empty if it does not exist or may not be read. Raises OSError when descriptors or memory
    run out."""
    data = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(data) < limit and (more := os.read(fd, limit - len(data))):  # /proc returns one page per read
                data += more
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return b""
    return data


def process(pid: int) -> Process | None:
    """None if there is no such process, or /proc hides it (hidepid)."""
    # The name stands in brackets and may contain brackets and spaces: the other fields follow the last bracket.
    fields = read_bytes(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return Process(pid, fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[19]))


def processes() -> dict[int, Process]:
    """All processes of the machine, by pid."""
    found = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {one.pid: one for one in found if one is not None}


def alive(pid: int, start_ticks: int) -> bool:
    """Whether exactly this process still runs."""
    now = process(pid)
    return now is not None and now.start_ticks == start_ticks and not now.ended


def rooted(table: dict[int, Process], roots: Iterable[int]) -> dict[int, int]:
    """The nearest root of each process that is a root or descends from one. One pass over the table."""
    known: dict[int, int] = {root: root for root in roots if root in table}
    for pid in table:
        path: list[int] = []
        at = pid
        while at in table and at not in known and len(path) <= len(table):
            path.append(at)
            known[at] = 0  # no root, unless the end of the path has one
            at = table[at].parent
        for one in path:
            known[one] = known.get(at, 0)
    return {pid: root for pid, root in known.items() if root}


def stands_still(pid: int) -> bool:
    """Whether the process is stopped by a signal, or frozen in a cgroup that is named so (carma/cgroups.py)."""
    found = process(pid)
    if found is None or found.ended:
        return False
    return found.state in STOPPED or read_bytes(f"/proc/{pid}/cgroup").rstrip().endswith(FROZEN_CGROUP)


def age_s(process: Process) -> float:
    """Seconds since the process started, measured on the time since the boot."""
    uptime_s = float(read_bytes("/proc/uptime", 64).split()[0])
    return uptime_s - process.start_ticks / os.sysconf("SC_CLK_TCK")


def boot_id() -> str:
    """Changes with each boot; start times of processes compare only within one boot."""
    return read_bytes("/proc/sys/kernel/random/boot_id", 64).decode("ascii", "replace").strip()


def environment_value(pid: int, name: bytes) -> bytes:
    """The value of a variable at the start of the process; empty also if its environment may not be read."""
    start = name + b"="
    entries = read_bytes(f"/proc/{pid}/environ", 2**20).split(b"\0")
    return next((entry[len(start) :] for entry in entries if entry.startswith(start)), b"")


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to exactly this process; False if it has ended or may not be signalled.

    The descriptor is opened before the identity is checked, so the signal cannot reach another process that got the
    pid in between. Without pidfd (an old kernel, no descriptor left) that gap remains.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        fd = -1
    try:
        if not alive(pid, start_ticks):
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(pid, number)
        return True
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. A blocked signal does not count: every fork blocks all of them
    for a moment, and a signal that is pending then may end the child."""
    caught = status_field(pid, b"SigCgt") or [b"0"]
    return bool(int(caught[0], 16) >> (number - 1) & 1)


def status_field(pid: int | str, name: bytes, proc: str = "/proc") -> list[bytes]:
    """The words of a line of the process's status; empty if there is no such process or line."""
    lines = read_bytes(f"{proc}/{pid}/status", 8192).split(b"\n")
    return next((line.split()[1:] for line in lines if line.startswith(name + b":")), [])


def open_files(pid: int, proc: str = "/proc") -> Iterator[str]:
    """The paths of its open files. Raises OSError if they may not be listed, or the process has ended."""
    for name in os.listdir(f"{proc}/{pid}/fd"):
        try:
            yield os.readlink(f"{proc}/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
