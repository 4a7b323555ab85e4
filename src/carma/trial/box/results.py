"""Copies files out of the sandbox, and the directory of compiled files in and out.

The command may leave anything under any name. So files are opened by descriptor, without following links, only if they
are regular, and within limits. The persistent directory is copied into the sandbox and back: during a run the command
writes to memory of a fixed size, never to the disk of the host.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

START_BYTES = 256  # of the awaited file
NOTE_BYTES = 64  # a note is a number or a word
MISSING, TOO_LARGE = -1, -2
_KEPT_NAME = re.compile(r"(?!tmp)[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")  # tmp…: unfinished files (tempfile.mkstemp)
_PART = ".part-"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def open_plain(folder: int, name: str) -> Iterator[int]:
    """A regular file. Raises OSError for everything else."""
    fd = os.open(name, _READ, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{name} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def starts_with(folder: int, name: str, pattern: str) -> bool:
    """Whether that file exists and starts as awaited: helper processes may leave reports that do not count."""
    start = _start_of(folder, name, START_BYTES)
    return start is not None and re.search(pattern.encode(), start) is not None


def read_note(folder: int, name: str) -> str | None:
    start = _start_of(folder, name, NOTE_BYTES)
    return None if start is None else start.decode("ascii", "replace").strip()


def _start_of(folder: int, name: str, count: int) -> bytes | None:
    with contextlib.suppress(OSError), open_plain(folder, name) as fd:
        return os.read(fd, count)
    return None


def copy_out(folder: int, name: str, target: int, limit_bytes: int) -> int:
    """Bytes copied; MISSING, or TOO_LARGE."""
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(open_plain(folder, name))
        except OSError:
            return MISSING
        size = os.fstat(source).st_size
        return TOO_LARGE if size > limit_bytes else _copy(source, target, size)


def _copy(source: int, target: int, size: int) -> int:
    copied = 0
    while copied < size:
        sent = os.sendfile(target, source, copied, size - copied)
        if sent == 0:
            break
        copied += sent
    return copied


def copy_kept(source: int, target: int, limit_bytes: int) -> None:
    """Copies the regular files of one directory that differ in size or time of change, up to the limit for the whole
    target. A file appears under its name only when it is complete."""
    _remove_parts(target)
    present = _kept(target)
    room = limit_bytes - sum(status.st_size for status in present.values())
    for name, status in sorted(_kept(source).items()):
        old = present.get(name)
        if old is not None and (old.st_size, old.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
            continue
        more = status.st_size - (0 if old is None else old.st_size)
        if more <= room:
            with contextlib.suppress(OSError):
                _copy_one(source, target, name, status.st_size)
                room -= more


def _copy_one(source: int, target: int, name: str, size: int) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_plain(source, name) as reading:
        writing = os.open(_PART + name, flags, 0o600, dir_fd=target)
        try:
            _copy(reading, writing, size)
            status = os.fstat(reading)
            os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
        os.rename(_PART + name, name, src_dir_fd=target, dst_dir_fd=target)


def _kept(folder: int) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if _KEPT_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def _remove_parts(folder: int) -> None:
    """Files of a copy that was interrupted."""
    for name in os.listdir(folder):
        if name.startswith(_PART):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
