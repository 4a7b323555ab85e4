"""Looks into files that belong to somebody else, for a daemon that may be root.

The paths come from the submitter: they may lead to a pipe, a device, a file without end or a loop of links. So nothing
but a regular file is ever opened, only its start is read, and no path raises: what cannot be read is not there. For a
submitter who is not root, root sees only what that user could read; its answers would otherwise tell what there is. A
user's access lists do not count here: then too little is seen, never too much. Must not run or write anything.
"""

from __future__ import annotations

import os
import re
import stat
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from carma.core.model import Owner

READ_LIMIT = 16 * 1024
ENTRIES_LIMIT = 20_000  # of a directory; the largest site-packages have some thousand
NAMES_LIMIT = 200
_KEPT = 128  # answers of each kind, before all are forgotten

# What a file or directory was when it was read: device, inode, size, time of change.
_Stamp = tuple[int, int, int, int]
K = TypeVar("K")
T = TypeVar("T")


class Peek:
    """One submitter's view, with a memory: the same file is read again only when it has changed."""

    def __init__(self, owner: Owner | None = None) -> None:
        """Without an owner: whatever the daemon's own account can read."""
        asks = owner is not None and os.geteuid() == 0 and owner.uid != 0
        self._owner = owner if asks else None
        self._texts: dict[str, tuple[_Stamp, str]] = {}
        self._names: dict[tuple[str, str], tuple[_Stamp, tuple[str, ...]]] = {}

    def is_file(self, path: str) -> bool:
        status = self._status(path)
        return status is not None and stat.S_ISREG(status.st_mode)

    def is_program(self, path: str) -> bool:
        status = self._status(path)
        return status is not None and stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)

    def text(self, path: str) -> str:
        """The start of a regular file; empty when there is none to read."""
        status = self._status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return ""
        known = self._texts.get(path)
        if known is not None and known[0] == _stamp(status):
            return known[1]
        text = self._read(path).decode("utf-8", "replace")
        _keep(self._texts, path, (_stamp(status), text))
        return text

    def names(self, path: str, wanted: re.Pattern[str]) -> tuple[str, ...]:
        """What of that a directory holds, sorted; empty when it is none, or not to be read."""
        status = self._status(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            return ()
        place = (path, wanted.pattern)
        known = self._names.get(place)
        if known is not None and known[0] == _stamp(status):
            return known[1]
        names = self._list(path, wanted) if self._may(path, status, os.R_OK) else ()
        _keep(self._names, place, (_stamp(status), names))
        return names

    def _list(self, path: str, wanted: re.Pattern[str]) -> tuple[str, ...]:
        try:
            with os.scandir(path) as entries:
                found = (entry.name for entry in islice(entries, ENTRIES_LIMIT) if wanted.fullmatch(entry.name))
                return tuple(sorted(islice(found, NAMES_LIMIT)))
        except (OSError, ValueError):
            return ()

    def _status(self, path: str) -> os.stat_result | None:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # a null byte, a name too long, a loop of links
            return None
        return status if self._owner is None or self._reaches(path) else None

    def _read(self, path: str) -> bytes:
        """Through a descriptor that opens nothing (O_PATH): what was looked at is what is read, and a file that turns
        into a device between the two is not touched."""
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (OSError, ValueError):
            return b""
        try:
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode) or not self._may(path, status, os.R_OK):
                return b""
            fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                return os.read(fd, READ_LIMIT)
            finally:
                os.close(fd)
        except OSError:
            return b""
        finally:
            os.close(place)

    def _may(self, path: str, status: os.stat_result, want: int) -> bool:
        return self._owner is None or (_allowed(status, self._owner, want) and self._reaches(path))

    def _reaches(self, path: str) -> bool:
        """Whether the owner may walk down to it, along the way that the links really take."""
        if self._owner is None:
            return True
        try:
            folder = os.path.dirname(os.path.realpath(path))
            while True:
                if not _allowed(os.stat(folder), self._owner, os.X_OK):
                    return False
                if folder == os.path.dirname(folder):
                    return True
                folder = os.path.dirname(folder)
        except (OSError, ValueError):
            return False


def _allowed(status: os.stat_result, owner: Owner, want: int) -> bool:
    if status.st_uid == owner.uid:
        bits = status.st_mode >> 6
    elif status.st_gid in _groups(owner.name, owner.gid):
        bits = status.st_mode >> 3
    else:
        bits = status.st_mode
    return bits & want == want


@lru_cache(maxsize=256)
def _groups(name: str, gid: int) -> frozenset[int]:
    try:
        return frozenset(os.getgrouplist(name, gid))
    except (OSError, KeyError):
        return frozenset((gid,))


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _keep(memory: dict[K, T], place: K, value: T) -> None:
    if len(memory) >= _KEPT:
        memory.clear()
    memory[place] = value
