"""The file of rows. Rows are appended as they come, so that a kill loses only the running ones.

A line without an id is a head: it says where and how the rows after it were measured. A row has the id of its config
and a digest of the config's line (`of`); the peaks of torch's allocator, footprint and context in bytes; `steps`,
`finite` (the losses), `oom`, `error`, `alone`, `retries`; with activity, FIGURES of activity.py. Times: `ready_s` from
the fork to a context, `made_s` for the model on the device, `trained_s` for the steps, `took_s` in all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "rows.jsonl"
LOCK = "rows.lock"


class InUse(Exception):
    """Another collector writes to the directory. The file may not name its process yet."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"process {pid} collects into it" if pid else "another process collects into it")


def lock(folder: Path) -> int:
    """Locks the directory and returns the descriptor that holds the lock; forks inherit it.

    The kernel removes the lock with the last of them. The file stays: if it were removed, two processes could lock
    two files.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 40, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise InUse(pid) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


class Rows:
    def __init__(self, folder: Path, resume: bool, activity: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        if not resume:
            set_aside(self.path)
        self._done = read_done(self.path, activity)
        mend(self.path)
        self.file = self.path.open("a", encoding="utf-8")
        self.counts: Counter[str] = Counter()  # of rows written: measured, oom, failed

    def write(self, row: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self.file.flush()
        except OSError as error:
            raise SystemExit(f"{self.path} cannot be written: {error.strerror}") from error
        if "id" in row:
            self.counts["oom" if row.get("oom") else "failed" if row.get("error") else "measured"] += 1

    def has(self, config: dict[str, Any]) -> bool:
        """A row without a digest is identified by its id."""
        return bool(self._done.get(config["id"], frozenset()) & {config["of"], None})


def set_aside(path: Path) -> None:
    """Rows are hours of a GPU, so the file is renamed and not deleted."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.old"))


def mend(path: Path) -> None:
    """Removes an incomplete last line."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def read_done(path: Path, activity: bool) -> dict[str, set[str | None]]:
    """The ids that need no further run, with their configs' digests."""
    done: dict[str, set[str | None]] = {}
    for row in read_rows(path.read_bytes() if path.exists() else b"", activity):
        done.setdefault(row["id"], set()).add(row.get("of"))
    return done


def read_rows(text: bytes, activity: bool) -> Iterator[dict[str, Any]]:
    """Rows without heads and broken lines; with activity, only those that have a step time."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "id" in row and (not activity or "step_ms" in row):
                yield row


def read_configs(path: Path) -> list[dict[str, Any]]:
    """Each config with the digest of its line, as `of`."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    return [{**json.loads(line), "of": digest(line)} for line in lines]


def digest(line: bytes) -> str:
    """Identifies a config's line: another version of the generator may give the same id to another config."""
    return hashlib.sha256(line.strip()).hexdigest()[:16]
