"""How much host memory the box holds: what its processes wrote to, and what lies in its file systems in memory.

Pages of files are not counted, the kernel takes those back when it needs them. Forked processes share pages, so the
cheap sum is too large; only when it passes the limit are shares asked for, which takes milliseconds for each process.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Meter:
    def __init__(self, stores: Sequence[int], proc: str = "/proc") -> None:
        """`stores`: descriptors on the file systems that lie in memory."""
        self._stores = stores
        self._proc = proc
        self.peak_bytes = 0  # of what was looked at, by the sum that decided

    def processes(self) -> int:
        return len(self._pids())

    def exceeds(self, limit_bytes: int) -> bool:
        stored = sum(used_bytes(fd) for fd in self._stores)
        pids = self._pids()
        held = stored + sum(figure_bytes(f"{self._proc}/{pid}/status", b"RssAnon:") for pid in pids)
        if held > limit_bytes:
            held = stored + sum(figure_bytes(f"{self._proc}/{pid}/smaps_rollup", b"Pss_Anon:") for pid in pids)
        self.peak_bytes = max(self.peak_bytes, held)
        return held > limit_bytes

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]


def used_bytes(fd: int) -> int:
    status = os.fstatvfs(fd)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def figure_bytes(path: str, key: bytes) -> int:
    """A line `Key:   123 kB`; 0 for a process that has gone."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0
