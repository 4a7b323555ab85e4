"""Where an attempt's output goes, and reading it back safely.

On a shared server the launcher is root and the log may lie in a directory of the user's, who could put a link to
somebody else's file in its place. So a log counts only if it is the very file that the submitter opened for writing and
the runner wrote down, and it is opened only once that is known: to open a device can already do something.
"""

from __future__ import annotations

import os
import stat

from carma.core.ports import LaunchOrder
from carma.launch.naming import fill

LogFile = tuple[int, int, int]  # device, inode, size when the attempt began


def expand(template: str, order: LaunchOrder) -> str:
    """With its places filled in (launch/naming.py); relative to the task's directory."""
    return os.path.join(order.spec.directory, fill(template, order))


def paths_for(order: LaunchOrder, default_stdout: str, default_stderr: str) -> tuple[str, str]:
    """With an output file alone, both go there, as in Slurm."""
    stdout = expand(order.spec.output, order) if order.spec.output else default_stdout
    if order.spec.error:
        return stdout, expand(order.spec.error, order)
    return stdout, stdout if order.spec.output else default_stderr


def open_log(path: str, expected: LogFile | None) -> int | None:
    """A descriptor for reading; None when the file is gone, is another one, or is no plain file.

    Links are followed if it is known which file must be behind them: a user's `-o` may be one.
    """
    follow = os.O_NOFOLLOW if expected is None else 0
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC | follow)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode) or (expected is not None and (found.st_dev, found.st_ino) != expected[:2]):
            return None
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    finally:
        os.close(place)


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
