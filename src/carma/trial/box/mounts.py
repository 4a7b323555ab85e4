"""What is mounted on this machine (/proc/self/mountinfo, proc(5)), and which paths answer.

A network drive or a FUSE mount that hangs must not block the sandbox. A `stat` on it may never return, and the calling
process cannot be killed. So another process calls it, with one thread for each path, and is abandoned if it does not
end.
"""

from __future__ import annotations

import _thread
import errno
import os
import re
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

_STACK_BYTES = 256 * 1024
_ESCAPE = re.compile(r"\\([0-7]{3})")
# No files: handles of namespaces, and triggers for a daemon that mounts on demand.
_NOT_FILES = ("nsfs", "autofs")


def mount_points(text: str) -> list[str]:
    """The paths of mounts that contain files, each once, parents before children."""
    found = set()
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and kind and kind[0] not in _NOT_FILES:
            found.add(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
    return sorted(found, key=lambda path: (path.count("/"), path))


def is_below(path: str, folder: str) -> bool:
    """Strictly."""
    return path != folder and (folder == "/" or path.startswith(folder + "/"))


def is_within(path: str, folder: str) -> bool:
    return path == folder or is_below(path, folder)


def nearest_below(folder: str, points: Iterable[str]) -> list[str]:
    """The mount points below a directory that are not below another of them."""
    below = [point for point in points if is_below(point, folder)]
    return [point for point in below if not any(is_below(point, other) for other in below)]


def answers(paths: Sequence[str], limit_s: float) -> dict[str, int]:
    """Returns for each path 0, or the error number of its file system. A path that hangs is missing. A path that does
    not exist, or that this user may not reach, has 0. `limit_s` is for all paths together. Raises OSError."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _stat_all(paths, writing)
    os.close(writing)
    try:
        found = _read_answers(reading, len(paths), time.monotonic() + limit_s)
    except OSError:
        os.waitpid(child, 0)  # it has ended
        raise
    finally:
        os.close(reading)
    os.kill(child, signal.SIGKILL)
    if len(found) == len(paths):
        os.waitpid(child, 0)
    return {paths[index]: error for index, error in found.items()}


def _stat_all(paths: Sequence[str], writing: int) -> NoReturn:
    """Never returns."""
    _thread.stack_size(_STACK_BYTES)
    try:
        for index, path in enumerate(paths):
            _thread.start_new_thread(_stat, (index, path, writing))
        while True:
            time.sleep(3600)
    finally:
        os._exit(1)


def _stat(index: int, path: str, writing: int) -> None:
    number = 0
    try:
        os.stat(path)  # also triggers mounts on demand, before the network is gone
    except (FileNotFoundError, PermissionError, NotADirectoryError, ValueError):
        pass
    except OSError as error:
        number = error.errno or errno.EIO
    os.write(writing, b"%d %d\n" % (index, number))


def _read_answers(reading: int, count: int, deadline: float) -> dict[int, int]:
    """Answers by the index of their path."""
    found: dict[int, int] = {}
    rest = b""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while len(found) < count and poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(reading, 1 << 16)
        if not piece:
            raise OSError(errno.EAGAIN, "no thread can be started to check which paths answer")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            index, _, number = line.partition(b" ")
            found[int(index)] = int(number)
    return found
