"""The output files of an attempt, as its runner handles them.

1. `OutputLimit` keeps a log file of CARMA's own directory below its size limit while the command writes to it. `cut`
   does so for a file whose end is of no use.
2. `OutputLimit.seal` takes the log file away from the submitter once the attempt has ended: nothing can be added to it,
   unless there is no limit.
3. `read_tails` reads the end of output files that the submitter named, through descriptors opened with the submitter's
   rights.

Standard library only: the runner imports this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import stat
import time

from carma.launch import attempt_records as records

BLOCK = 4096
SEALED_MODE = 0o400  # of log files of ended attempts, which belong to the daemon's user
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
        """`limit_bytes`: 0 for no limit. Raises BlockingIOError while the submitter, who owns the file, holds a lease
        on it. While this object has it open, no lease can be taken."""
        self._path, self.limit_bytes = path, limit_bytes
        # Not O_APPEND: the note has a position.
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        self._allocated_bytes = 0
        self.grows_fast = False

    def shorten(self) -> None:
        if not self.limit_bytes:
            return
        status = os.fstat(self._fd)
        allocated_bytes = status.st_blocks * 512
        self.grows_fast = allocated_bytes - self._allocated_bytes > self.limit_bytes // 8
        self._allocated_bytes = allocated_bytes
        if allocated_bytes <= self.limit_bytes:
            return
        if status.st_size > self.limit_bytes:
            self._remove_beginning(status.st_size)
        if os.fstat(self._fd).st_blocks * 512 > self.limit_bytes:
            # The submitter owns the file and may have allocated blocks behind its end. Output written between these two
            # calls is lost: that takes a file at its limit and a few microseconds.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)

    def _remove_beginning(self, size: int) -> None:
        end = (size - self.limit_bytes // 2) // BLOCK * BLOCK
        if _libc.fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, 0, end) == 0:
            note = self._note(end)
            os.pwrite(self._fd, note, end - len(note))
            return
        kept_bytes = min(_REWRITTEN_BYTES, self.limit_bytes // 2)
        kept = os.pread(self._fd, kept_bytes, max(0, size - kept_bytes))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._note(size - len(kept)) + kept, 0)

    def seal(self) -> None:
        """Give the file to the daemon's user, who is then the only one who can open it. If another process can still
        write to it, or has given it a second name, it is replaced by a copy of what is kept. To be called once, when
        the attempt has ended. Raises OSError (a full disk); `seal` of this module then repeats it."""
        try:
            before = os.fstat(self._fd)
            os.fchown(self._fd, os.geteuid(), os.getegid())
            os.fchmod(self._fd, 0o600)  # the submitter may have opened it to others, also by an access list
            self.shorten()
            reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(self._fd)
        try:
            if self.limit_bytes and (before.st_nlink != 1 or _has_writer(reader)):
                _replace_by_copy(self._path, reader, self.limit_bytes)
                os.fchown(reader, before.st_uid, before.st_gid)  # it counts for the submitter's disk quota again
            else:
                os.fchmod(reader, SEALED_MODE)
        finally:
            os.close(reader)

    def _note(self, removed_bytes: int) -> bytes:
        removed, limit = removed_bytes >> 20, self.limit_bytes >> 20
        return (
            f"\n[carma: the first {removed} MiB of this output were removed; "
            f"the limit is {limit} MiB (setting launch.max_output_mib)]\n"
        ).encode()


def seal(path: str, limit_bytes: int) -> None:
    """Seal a log file by name, if that is not done yet. The directory must be closed to the submitter. Raises
    BlockingIOError while the submitter holds a lease on the file, which ends after /proc/sys/fs/lease-break-time."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), SEALED_MODE):
        return
    os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)  # first: only the owner can take a lease
    OutputLimit(path, limit_bytes).seal()


def _has_writer(reader: int) -> bool:
    """Whether a process has the file open or mapped for writing. If none has, the kernel grants a read lease (fcntl(2),
    F_SETLEASE). On a file system without leases the answer is yes."""
    try:
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; SIGIO would end this process
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def _replace_by_copy(path: str, source: int, limit_bytes: int) -> None:
    """At most `limit_bytes`, at the same positions. Another process may write to the source meanwhile."""
    fresh = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, SEALED_MODE)
    try:
        _copy_data(source, target, limit_bytes)
        os.rename(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
    finally:
        os.close(target)


def _copy_data(source: int, target: int, limit_bytes: int) -> None:
    """Without the holes of the source, which take no space in the target either."""
    size, position, left = os.fstat(source).st_size, 0, limit_bytes
    os.ftruncate(target, size)
    while left > 0 and position < size:
        try:
            position = os.lseek(source, position, os.SEEK_DATA)
            end = min(size, position + left, os.lseek(source, position, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                return
            raise
        os.lseek(target, position, os.SEEK_SET)
        while position < end and (sent := os.sendfile(target, source, position, end - position)):
            position += sent
            left -= sent
        if position < end:  # it was truncated meanwhile
            return


def cut(fd: int, limit_bytes: int) -> None:
    """The user of the task owns the file and could let it grow."""
    try:
        status = os.fstat(fd)
        if status.st_size > limit_bytes or status.st_blocks * 512 > limit_bytes + BLOCK:
            os.ftruncate(fd, min(status.st_size, limit_bytes))
    except OSError:  # retried at the next check
        return


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
