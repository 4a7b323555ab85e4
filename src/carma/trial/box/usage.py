"""Counts the threads of the sandbox and the host memory that it holds, by reading /proc.

Counted: anonymous pages, file systems in memory (`stores`), and shared memory outside of them: memfd, MAP_SHARED, SysV.
Pages of files on disk are not counted: the kernel reclaims them when it needs memory. With a cgroup the kernel counts
instead, and exactly.

A memfd that no process has open, because it is in the queue of a socket (SCM_RIGHTS) or registered with io_uring,
cannot be measured. While there are such descriptors at all, the growth of the machine's shared memory that is not
explained by what was counted is counted too. Linux shows them since 5.6 (`scm_fds` in /proc/PID/fdinfo). Not found:
kernel memory (buffers of sockets and pipes), and an io_uring that is mapped and not open.

Forked processes share pages, so the sum over processes is too large. The exact sum takes milliseconds for each process
and is computed only if the simple sum exceeds the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence

EXACT_SHARE, DESCRIPTORS_SHARE = 0.2, 0.05  # maximum shares of the time for exact sums and for reading descriptors
_STATUS = re.compile(rb"^(Threads|RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)
_PSS_ANON = re.compile(rb"^Pss_Anon:\s+(\d+)", re.MULTILINE)
_PSS = re.compile(rb"^Pss:\s+(\d+)", re.MULTILINE)
# Objects in the kernel's internal file system for shared memory: `/memfd:name (deleted)`, `/dev/zero (deleted)`.
_SHARED_MAPPING = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+) +(?:/memfd:|/dev/zero \(deleted\))")
_HEADING = re.compile(rb"^(?=[0-9a-f]+-[0-9a-f]+ )", re.MULTILINE)
_PASSED = re.compile(rb"^(?:scm_fds|UserFiles):\s+(\d+)", re.MULTILINE)  # in fdinfo of a socket, of an io_uring
_SHMEM = re.compile(rb"^Shmem:\s+(\d+)", re.MULTILINE)
# Scans in a row that find such descriptors. Programs pass descriptors between their processes, within microseconds; a
# scan that finds none sees what they refer to.
PASSED_SCANS = 3
_SYSV_RSS = 14  # column of /proc/sysvipc/shm


class UsageMeter:
    def __init__(self, stores: Sequence[int]) -> None:
        """`stores`: descriptors of the file systems that are in memory."""
        self._stores = stores
        self._memfds: dict[int, int] = {}  # bytes by inode
        self._passed_scans = 0  # in a row that found descriptors in the queue of a socket
        self._shmem_before = self._shmem_bytes()
        self._next_exact = self._next_descriptors = 0.0
        self.unattributed_bytes = 0  # part of the memory when its limit was reached: may belong to other programs

    def exceeded(self, threads: int, memory_bytes: int) -> str:
        """`processes` or `memory`: the limit that is reached; "" if none is."""
        pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(pids) >= threads:
            return "processes"
        figures = [dict(_STATUS.findall(self._read(f"{pid}/status"))) for pid in pids]
        if sum(int(found.get(b"Threads", 0)) for found in figures) >= threads:
            return "processes"
        mapped_kb = sum(int(found.get(b"RssAnon", 0)) + int(found.get(b"RssShmem", 0)) for found in figures)
        return "memory" if self._exceeds_memory(pids, mapped_kb * 1024, memory_bytes) else ""

    def _exceeds_memory(self, pids: Sequence[str], mapped_bytes: int, limit_bytes: int) -> bool:
        self._scan_descriptors(pids)
        stored = sum(used_bytes(fd) for fd in self._stores) + self._sysv_bytes() + sum(self._memfds.values())
        most = stored + mapped_bytes + self._hidden_bytes(stored)
        if most <= limit_bytes or time.monotonic() < self._next_exact:
            return False
        began = time.monotonic()
        shared = stored + sum(self._shared_bytes(pid) for pid in pids if self._maps_shared(pid))
        self.unattributed_bytes = self._hidden_bytes(shared)
        held = shared + self.unattributed_bytes + sum(self._anonymous_bytes(pid) for pid in pids)
        self._next_exact = _after(began, EXACT_SHARE)
        return held > limit_bytes

    def _hidden_bytes(self, shared_bytes: int) -> int:
        """Shared memory that may be in descriptors which no process has open. `shared_bytes`: what was found."""
        if self._passed_scans < PASSED_SCANS:
            return 0
        return max(0, self._shmem_bytes() - self._shmem_before - shared_bytes)

    def _shmem_bytes(self) -> int:
        """All shared memory of the machine, with file systems in memory."""
        found = _SHMEM.search(self._read("meminfo"))
        return int(found[1]) * 1024 if found else 0

    def _anonymous_bytes(self, pid: str) -> int:
        """The share of this process in anonymous pages."""
        return 1024 * sum(int(kb) for kb in _PSS_ANON.findall(self._read(f"{pid}/smaps_rollup")))

    def _maps_shared(self, pid: str) -> bool:
        return any(self._uncounted(line) for line in self._read(f"{pid}/maps").splitlines())

    def _shared_bytes(self, pid: str) -> int:
        total = 0
        for mapping in _HEADING.split(self._read(f"{pid}/smaps")):
            if self._uncounted(mapping) and (share := _PSS.search(mapping)):
                total += int(share[1]) * 1024
        return total

    def _uncounted(self, mapping: bytes) -> bool:
        found = _SHARED_MAPPING.match(mapping)
        return found is not None and int(found[2]) not in self._memfds

    def _scan_descriptors(self, pids: Sequence[str]) -> None:
        """The bytes of all memfds that a process has open: their pages need not be mapped. Also notes
        whether there are descriptors that were passed on and not received."""
        began = time.monotonic()
        if began < self._next_descriptors:
            return
        self._memfds, passed = {}, 0
        for pid in pids:
            passed += self._scan_process(pid)
        self._passed_scans = self._passed_scans + 1 if passed else 0
        self._next_descriptors = _after(began, DESCRIPTORS_SHARE)

    def _scan_process(self, pid: str) -> int:
        """Adds its memfds; returns the number of descriptors in its sockets and in its io_uring instances."""
        folder, passed = f"/proc/{pid}/fd", 0
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    # Not os.stat for each: a file on a network drive that hangs would block the supervisor.
                    target = os.readlink(f"{folder}/{name}")
                    if target.startswith("/memfd:"):
                        status = os.stat(f"{folder}/{name}")
                        self._memfds[status.st_ino] = status.st_blocks * 512
                    elif target.startswith("socket:") or target == "anon_inode:[io_uring]":
                        passed += sum(int(count) for count in _PASSED.findall(self._read(f"{pid}/fdinfo/{name}")))
        return passed

    def _sysv_bytes(self) -> int:
        rows = [line.split() for line in self._read("sysvipc/shm").splitlines()[1:]]
        return sum(int(row[_SYSV_RSS]) for row in rows if len(row) > _SYSV_RSS)

    def _read(self, name: str) -> bytes:
        """Empty for a process that has ended."""
        with contextlib.suppress(OSError), open(f"/proc/{name}", "rb") as file:
            return file.read()
        return b""


def used_bytes(fd: int) -> int:
    status = os.fstatvfs(fd)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _after(began: float, share: float) -> float:
    """The next time, so that the work takes at most this share of the time."""
    now = time.monotonic()
    return now + (now - began) * (1 / share - 1)
