"""What is mounted on this machine, read from /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

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
