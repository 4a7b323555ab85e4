"""The cgroup of each attempt: with it all processes of the attempt are known, whatever they do to leave their parents.

Only where the daemon may create cgroups (carma/cgroups.py). The runner joins the cgroup before it starts anything, and
a process of another user than the daemon's cannot leave it. Daemons with different log directories never share a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re

from carma.cgroups import Cgroup, Cgroups
from carma.core.model.values import AttemptKey, TaskId

KILL_LIMIT_S = 0.5  # a process that is stuck in the kernel must not hold up the launcher


class AttemptCgroups:
    def __init__(self, cgroups: Cgroups, log_dir: str | os.PathLike[str]) -> None:
        self.cgroups = cgroups
        home = hashlib.blake2b(os.fsencode(os.path.abspath(log_dir)), digest_size=6).hexdigest()
        self._prefix = f"attempt-{home}-"

    def create(self, key: AttemptKey) -> Cgroup:
        """The cgroup of this attempt, made if it does not exist. Raises OSError."""
        return self.cgroups.create(self._prefix + str(key))

    def members(self, key: AttemptKey) -> list[int]:
        group = self._open(key)
        return group.members() if group is not None else []

    def kill(self, key: AttemptKey) -> None:
        group = self._open(key)
        if group is not None:
            group.kill(KILL_LIMIT_S)

    def remove(self, key: AttemptKey) -> None:
        """Its limits go with it. A cgroup that still has processes stays."""
        group = self._open(key)
        if group is not None:
            with contextlib.suppress(OSError):
                group.remove()

    def existing(self) -> list[AttemptKey]:
        """The attempts that have a cgroup, also those of an earlier daemon."""
        found = (re.fullmatch(re.escape(self._prefix) + r"(\d+)\.(\d+)", name) for name in self.cgroups.names())
        return [AttemptKey(TaskId(int(match[1])), int(match[2])) for match in found if match is not None]

    def _open(self, key: AttemptKey) -> Cgroup | None:
        return self.cgroups.open(self._prefix + str(key))
