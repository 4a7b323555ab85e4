"""Where an attempt's output goes, and reading it back safely.

On a shared server the launcher is root and the log may lie in a directory of the user's, who could put a link to
somebody else's file in its place. So a log is opened without following links, and only counts if it is the very file
that the runner wrote down when the attempt started.
"""

from __future__ import annotations

import os
import re
import stat

from carma.core.ports import LaunchOrder

LogFile = tuple[int, int, int]  # device, inode, size when the attempt began

_PLACE = re.compile(r"%([%jxat])")


def expand(template: str, order: LaunchOrder) -> str:
    """`%j` id, `%x` name, `%a` array index, `%t` attempt, `%%` a per cent sign; relative to the task's directory."""
    array = order.spec.array
    values = {
        "%": "%",
        "j": str(order.key.task),
        "x": re.sub(r"[/\0]", "_", order.spec.name) or "task",
        "a": str(array.index) if array is not None else "0",
        "t": str(order.key.attempt),
    }
    path = _PLACE.sub(lambda match: values[match[1]], template)
    return os.path.join(order.spec.directory, path)


def paths_for(order: LaunchOrder, default_stdout: str, default_stderr: str) -> tuple[str, str]:
    """With an output file alone, both go there, as in Slurm."""
    stdout = expand(order.spec.output, order) if order.spec.output else default_stdout
    if order.spec.error:
        return stdout, expand(order.spec.error, order)
    return stdout, stdout if order.spec.output else default_stderr


def open_log(path: str, expected: LogFile | None) -> int | None:
    """A descriptor for reading; None when the file is gone, is another one, or is no plain file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and (expected is None or (found.st_dev, found.st_ino) == expected[:2]):
        return fd
    os.close(fd)
    return None


def read_tail(path: str, expected: LogFile | None, limit: int) -> str:
    """The last `limit` bytes that this attempt wrote; what an earlier one left in the same file does not count."""
    fd = open_log(path, expected)
    if fd is None:
        return ""
    try:
        size = os.fstat(fd).st_size
        begin = expected[2] if expected is not None and expected[2] <= size else 0
        start = max(begin, size - limit)
        return os.pread(fd, size - start, start).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
