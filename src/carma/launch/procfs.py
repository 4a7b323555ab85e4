"""Processes as /proc shows them: identity, parents, sessions. Standard library only: the runner imports it.

A process is identified by pid *and* start time (in clock ticks since the boot), because pids are reused. When
descriptors or memory run out, the functions raise OSError: a process that cannot be looked at is not a process that
has ended.
"""

from __future__ import annotations

import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


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
        """A zombie, or about to vanish: it holds nothing any more."""
        return self.state in "ZXx"


def read_bytes(path: str, limit: int = 65536) -> bytes:
    """The start of a file; empty if it does not exist or may not be read. Raises OSError when descriptors or memory
    run out."""
    data = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(data) < limit and (more := os.read(fd, limit - len(data))):  # /proc answers a page at a time
                data += more
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return b""
    return data


def process(pid: int) -> Process | None:
    """None when there is no such process."""
    # The name, in brackets, may hold anything, also brackets and spaces: what counts comes after the last one.
    fields = read_bytes(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return Process(pid, fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[19]))


def processes() -> dict[int, Process]:
    """All processes there are, by pid."""
    seen = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {one.pid: one for one in seen if one is not None}


def alive(pid: int, start_ticks: int) -> bool:
    """Whether that very process still runs."""
    now = process(pid)
    return now is not None and now.start_ticks == start_ticks and not now.ended


def rooted(table: dict[int, Process], roots: Iterable[int]) -> dict[int, int]:
    """For each process that is a root or came from one: the nearest root. One walk for all of them."""
    known: dict[int, int] = {root: root for root in roots if root in table}
    for pid in table:
        path: list[int] = []
        at = pid
        while at in table and at not in known and len(path) <= len(table):
            path.append(at)
            known[at] = 0  # nothing, until the walk says otherwise
            at = table[at].parent
        for one in path:
            known[one] = known.get(at, 0)
    return {pid: root for pid, root in known.items() if root}


def age_s(process: Process) -> float:
    """Seconds since the process started, by the time since the boot."""
    uptime_s = float(read_bytes("/proc/uptime", 64).split()[0])
    return uptime_s - process.start_ticks / os.sysconf("SC_CLK_TCK")


def boot_id() -> str:
    """Changes with each start of the machine; start times of processes compare only within one."""
    return read_bytes("/proc/sys/kernel/random/boot_id", 64).decode("ascii", "replace").strip()


def environment_value(pid: int, name: bytes) -> bytes:
    """What a variable was when the process started; empty also when its environment is not ours to read."""
    start = name + b"="
    entries = read_bytes(f"/proc/{pid}/environ", 2**20).split(b"\0")
    return next((entry[len(start) :] for entry in entries if entry.startswith(start)), b"")


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Signal that very process; False when it is gone or not ours to signal.

    The descriptor is opened before the identity is checked, so the signal cannot reach another process that got the
    pid in between.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without pidfd, or no descriptor left: the gap before the signal cannot be closed
        return _alive_or_unknown(pid, start_ticks) and _kill(pid, number)
    try:
        if not alive(pid, start_ticks):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _alive_or_unknown(pid: int, start_ticks: int) -> bool:
    """False if that process has ended or cannot be looked at."""
    try:
        return alive(pid, start_ticks)
    except OSError:
        return False


def listens(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. Blocked is not enough: every fork blocks all of them for a
    moment, and what is pending then may be the end of the child."""
    status = read_bytes(f"/proc/{pid}/status", 8192).split(b"\n")
    caught = next((line[7:].strip() for line in status if line.startswith(b"SigCgt:")), b"0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
        return True
    except OSError:
        return False
