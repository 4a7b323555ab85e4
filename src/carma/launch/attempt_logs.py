"""Where an attempt's output goes, and CARMA's own log files.

The daemon never opens a file that a user named: it may be root, and the path may lead anywhere by the time it is
opened. Such a file is read by its owner (the command line does that), or by the runner through a descriptor that was
opened with the owner's rights before the command started. CARMA's own log files lie in the attempt's directory, which
only the daemon's user can change, and are found by the attempt's key alone.
"""

from __future__ import annotations

import os
import stat

from carma.core.model.values import AttemptKey, Owner, TaskSpec
from carma.launch.program_names import fill

Named = tuple[str | None, str | None]  # files that the submitter named for stdout and stderr; None: CARMA's own


def named_outputs(key: AttemptKey, owner: Owner, spec: TaskSpec) -> Named:
    """With an output file alone, both streams go there, as in Slurm."""
    stdout = _expanded(spec.output, key, owner, spec) if spec.output else None
    stderr = _expanded(spec.error, key, owner, spec) if spec.error else stdout
    return stdout, stderr


def _expanded(template: str, key: AttemptKey, owner: Owner, spec: TaskSpec) -> str:
    return os.path.join(spec.directory, fill(template, key, owner, spec))


def open_own(path: str) -> int | None:
    """A descriptor for reading one of CARMA's own log files; None if there is none yet."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        return None
    return found


def read_tail(path: str, limit: int) -> str:
    """The last `limit` bytes of one of CARMA's own log files."""
    fd = open_own(path)
    if fd is None:
        return ""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, limit, max(0, size - limit)).decode("utf-8", "replace")
    finally:
        os.close(fd)
