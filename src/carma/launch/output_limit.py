"""Keeps a log file of CARMA's own directory below its size limit while the command writes to it.

The beginning is removed and the end is kept: the kernel frees the blocks (a hole in the file), so that the positions of
the command, which appends, and of readers stay valid. A line that says what was removed is at the end of the hole. If
the file system cannot do that, the file is cut to its last part. Standard library only: the runner imports this module.
"""

from __future__ import annotations

import ctypes
import os

BLOCK = 4096
_PUNCH_HOLE_KEEP_SIZE = 3
_REWRITTEN_BYTES = 1 << 20  # kept where the file system cannot free blocks

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class OutputLimit:
    """One log file. `shorten` is called about once a second, and more often while `grows_fast`."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # not O_APPEND: the note has a position
        self._held_bytes = 0
        self.grows_fast = False

    def shorten(self) -> None:
        status = os.fstat(self._fd)
        held_bytes = status.st_blocks * 512
        self.grows_fast = held_bytes - self._held_bytes > self._limit_bytes // 8
        self._held_bytes = held_bytes
        if held_bytes <= self._limit_bytes:
            return
        if status.st_size > self._limit_bytes:
            self._remove_beginning(status.st_size)
        if os.fstat(self._fd).st_blocks * 512 > self._limit_bytes:
            # Blocks behind the end, which the submitter, who owns the file, may have allocated. What is written between
            # these two calls is lost; that takes a writer at the limit and a few microseconds.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)

    def _remove_beginning(self, size: int) -> None:
        end = (size - self._limit_bytes // 2) // BLOCK * BLOCK
        if _libc.fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, 0, end) == 0:
            note = self._note(end)
            os.pwrite(self._fd, note, end - len(note))
        else:
            self._rewrite(size)

    def _rewrite(self, size: int) -> None:
        keep_bytes = min(_REWRITTEN_BYTES, self._limit_bytes // 2)
        kept = os.pread(self._fd, keep_bytes, max(0, size - keep_bytes))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._note(size - len(kept)) + kept, 0)

    def _note(self, removed_bytes: int) -> bytes:
        removed, limit = removed_bytes >> 20, self._limit_bytes >> 20
        return (
            f"\n[carma: the first {removed} MiB of this output were removed; "
            f"the limit is {limit} MiB (setting launch.max_output_mib)]\n"
        ).encode()
