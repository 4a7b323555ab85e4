"""Computes a digest of what a command depends on: `python -I -S digest.py`, with the order on standard input.

It is a process of its own with the credentials of the owner, so that the kernel decides what may be read (access lists
and NFS included), and so that it can be abandoned if a file system hangs. Reads regular files only, within bounds;
runs and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FILES_LIMIT, BYTES_LIMIT, FOLDERS_LIMIT = 2_000, 32 * 2**20, 500
WHOLE_BYTES = 4 * 2**20  # larger files count by size and time of change
TEXTS = (".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
# Directories without source files: made by tools or by runs, or data.
SKIPPED = frozenset((
    "__pycache__", "node_modules", "site-packages", "venv", "env", "data", "dataset", "datasets", "wandb", "mlruns",
    "outputs", "output", "multirun", "lightning_logs", "runs", "logs", "checkpoints", "results",
))  # fmt: skip
_PYTHON = re.compile(r"python[0-9.]*")
_notes_paths = False
_NO_WAIT = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def note(path: str) -> None:
    """Writes the path into the memory file at standard error, where the daemon reads it if the next call hangs."""
    if _notes_paths:
        os.ftruncate(2, 0)
        os.pwrite(2, os.fsencode(path), 0)


class Digest:
    def __init__(self, directory: str, environment: dict[str, str]) -> None:
        self.hash = hashlib.sha256()
        self._directory = directory
        self._path = environment.get("PATH", os.defpath).split(":")
        self._files, self._bytes, self._folders = FILES_LIMIT, BYTES_LIMIT, FOLDERS_LIMIT
        self._seen: set[tuple[int, int]] = set()

    def add(self, *words: object) -> None:
        self.hash.update(json.dumps(words).encode("ascii"))

    def add_command(self, words: list[str]) -> None:
        """The files and directories that its arguments name, then the source files around them."""
        roots = [self._directory]
        for path in self._named(words):
            with suppress(OSError, ValueError):
                note(path)
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):
                    self.add_file(path)
                    roots.append(os.path.dirname(path))
                elif stat.S_ISDIR(status.st_mode):
                    self._add_top(path)
        for root in roots:
            self.add_sources(root)

    def _named(self, words: list[str]) -> Iterator[str]:
        for word in words:
            for text in (word, word.partition("=")[2]):
                if text and len(text) < 4096:
                    yield os.path.normpath(os.path.join(self._directory, os.path.expanduser(text)))

    def add_interpreter(self, words: list[str]) -> None:
        """The program, and the state of the packages of each Python that the command may use."""
        for name in dict.fromkeys((words[0], "python", "python3")):
            program = self._find(name)
            if program is None:
                continue
            self._add_stamp(program)
            if name != words[0] or _PYTHON.fullmatch(os.path.basename(name)):
                for prefix in dict.fromkeys(
                    os.path.dirname(os.path.dirname(p)) for p in (program, os.path.realpath(program))
                ):
                    self._add_packages(prefix)

    def _find(self, name: str) -> str | None:
        folders = self._path if "/" not in name else [self._directory]
        for folder in folders:
            path = os.path.join(folder, name)
            note(path)
            if os.access(path, os.X_OK) and os.path.isfile(path):
                return path
        return None

    def _add_packages(self, prefix: str) -> None:
        self._add_stamp(os.path.join(prefix, "pyvenv.cfg"))
        with suppress(OSError):
            for name in sorted(os.listdir(os.path.join(prefix, "lib"))):
                if _PYTHON.fullmatch(name):
                    for kind in ("site-packages", "dist-packages"):
                        self._add_stamp(os.path.join(prefix, "lib", name, kind))

    def _add_stamp(self, path: str) -> None:
        with suppress(OSError, ValueError):
            note(path)
            status = os.stat(path)
            self.add(os.path.realpath(path), status.st_size if stat.S_ISREG(status.st_mode) else 0, status.st_mtime_ns)

    def _add_top(self, folder: str) -> None:
        """A directory that an argument names: data or a model. Files count by size and time, text files by content."""
        with suppress(OSError):
            for name in sorted(os.listdir(folder))[:FILES_LIMIT]:
                path = os.path.join(folder, name)
                if name.endswith(TEXTS):
                    self.add_file(path)
                else:
                    self._add_stamp(path)

    def add_sources(self, root: str) -> None:
        """All text files below a directory, the nearest first and in order of their names, up to the bounds."""
        waiting = [root]
        while waiting and self._folders > 0:
            folder = waiting.pop(0)
            self._folders -= 1
            note(folder)
            try:
                status = os.stat(folder)
                names = sorted(os.listdir(folder))
            except (OSError, ValueError):
                continue
            if (status.st_dev, status.st_ino) in self._seen:
                continue
            self._seen.add((status.st_dev, status.st_ino))
            for name in names:
                path = os.path.join(folder, name)
                if name.endswith(TEXTS):
                    self.add_file(path)
                elif not name.startswith(".") and name not in SKIPPED and is_source_folder(path):
                    waiting.append(path)

    def add_file(self, path: str) -> None:
        if self._files <= 0:
            return
        self._files -= 1
        with suppress(OSError, ValueError):
            note(path)
            if not stat.S_ISREG(os.stat(path).st_mode):
                return
            fd = os.open(path, _NO_WAIT)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return
                if status.st_size > min(WHOLE_BYTES, self._bytes):
                    self.add(path, status.st_size, status.st_mtime_ns)
                else:
                    data = os.read(fd, status.st_size + 1)
                    self._bytes -= len(data)
                    self.add(path, hashlib.sha256(data).hexdigest())
            finally:
                os.close(fd)


def is_source_folder(path: str) -> bool:
    """Whether a directory is no Python environment, whatever its name; links are not followed."""
    return (
        not os.path.islink(path)
        and os.path.isdir(path)
        and not os.path.exists(os.path.join(path, "pyvenv.cfg"))
        and not os.path.exists(os.path.join(path, "conda-meta"))
    )


def digest(order: dict[str, Any]) -> str:
    """`order`: command, directory, environment (already without noise), and whose it is."""
    found = Digest(order["directory"], order["environment"])
    found.add(order["command"], order["directory"], sorted(order["environment"].items()), order["owner"])
    found.add_interpreter(order["command"])
    found.add_command(order["command"])
    for folder in order["environment"].get("PYTHONPATH", "").split(":"):
        if folder:
            found.add_sources(os.path.join(order["directory"], folder))
    return found.hash.hexdigest()


def main() -> None:
    global _notes_paths
    _notes_paths = True
    order = json.load(sys.stdin)
    if order["identity"] is not None:
        os.setgroups(order["identity"]["groups"])
        os.setgid(order["identity"]["gid"])
        os.setuid(order["identity"]["uid"])
    sys.stdout.write(digest(order))


if __name__ == "__main__":
    main()
