"""The file of rows: appended to as they come, so that a kill at any moment loses only what is running.

A line without an id is a head: it tells where and how the rows after it were measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = "rows.jsonl"


class Rows:
    def __init__(self, folder: Path, resume: bool, activity: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        if not resume and self.path.exists():
            self.path.replace(folder / f"{NAME}.old")  # hours of a GPU are not thrown away
        self.done = read_done(self.path, activity)
        mend(self.path)
        self.file = self.path.open("a", encoding="utf-8")
        self.measured = self.oom = self.failed = 0

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.file.flush()
        if "id" in row:
            self.oom += bool(row.get("oom"))
            self.failed += bool(row.get("error"))
            self.measured += not row.get("oom") and not row.get("error")

    @property
    def written(self) -> int:
        return self.measured + self.oom + self.failed


def mend(path: Path) -> None:
    """Cuts off a last line that was not written to its end."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def read_done(path: Path, activity: bool) -> set[str]:
    """Ids that need no other run. For activity, a row without it does not count."""
    done = set()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "id" in row and (not activity or "step_ms" in row):
            done.add(str(row["id"]))
    return done


def read_configs(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
