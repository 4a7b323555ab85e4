"""The output files of an attempt, as its runner handles them.

1. `OutputLimit` keeps a log file of CARMA's own directory below its size limit while the command writes to it.
2. `read_tails` reads the end of output files that the submitter named, through descriptors opened with the submitter's
   rights.

Standard library only: the runner imports this module.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time

from carma.launch import attempt_records as records

BLOCK = 4096
TAIL_LIMIT_S = 10.0  # for reading all tails
TAIL_BYTES = 64 * 1024  # of each file; launch/attempt_files.py reads as much of CARMA's own log files
_PUNCH_HOLE_KEEP_SIZE = 3
_REWRITTEN_BYTES = 1 << 20  # kept where the file system cannot free blocks

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class OutputLimit:
    """The size limit of one log file. `shorten` is called about once a second, and more often while `grows_fast`.

    The beginning of the file is removed and its end is kept. The kernel frees the blocks (a hole in the file), so that
    the positions of the command, which appends, and of readers stay valid. A line at the end of the hole says what was
    removed. If the file system cannot free blocks, the file is rewritten with its last part only.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # not O_APPEND: the note has a position
        self._allocated_bytes = 0
        self.grows_fast = False

    def shorten(self) -> None:
        status = os.fstat(self._fd)
        allocated_bytes = status.st_blocks * 512
        self.grows_fast = allocated_bytes - self._allocated_bytes > self._limit_bytes // 8
        self._allocated_bytes = allocated_bytes
        if allocated_bytes <= self._limit_bytes:
            return
        if status.st_size > self._limit_bytes:
            self._remove_beginning(status.st_size)
        if os.fstat(self._fd).st_blocks * 512 > self._limit_bytes:
            # The submitter owns the file and may have allocated blocks behind its end. Output written between these two
            # calls is lost: that takes a file at its limit and a few microseconds.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)

    def _remove_beginning(self, size: int) -> None:
        end = (size - self._limit_bytes // 2) // BLOCK * BLOCK
        if _libc.fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, 0, end) == 0:
            note = self._note(end)
            os.pwrite(self._fd, note, end - len(note))
            return
        kept_bytes = min(_REWRITTEN_BYTES, self._limit_bytes // 2)
        kept = os.pread(self._fd, kept_bytes, max(0, size - kept_bytes))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._note(size - len(kept)) + kept, 0)

    def _note(self, removed_bytes: int) -> bytes:
        removed, limit = removed_bytes >> 20, self._limit_bytes >> 20
        return (
            f"\n[carma: the first {removed} MiB of this output were removed; "
            f"the limit is {limit} MiB (setting launch.max_output_mib)]\n"
        ).encode()


def read_tails(readers: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The part of each file that this attempt wrote, its last TAIL_BYTES. `readers`: a descriptor, and the size of the
    file at the start. Runs in a process of its own, because the file system may have stopped answering."""
    if not readers:
        return {}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tails = {f"{name}_tail": _read_tail(fd, start) for name, (fd, start) in readers.items()}
            records.write_all(writing, json.dumps(tails).encode("ascii"))
        finally:
            os._exit(0)
    os.close(writing)
    data, deadline_s = b"", time.monotonic() + TAIL_LIMIT_S
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000) and (piece := os.read(reading, 1 << 16)):
        data += piece
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    return records.decode(data) or {}


def _read_tail(fd: int, start: int) -> str:
    size = os.fstat(fd).st_size
    begin = max(start if start <= size else 0, size - TAIL_BYTES)
    return os.pread(fd, size - begin, begin).decode("utf-8", "replace")
