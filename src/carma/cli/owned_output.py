"""Output that the task sent to a file of its owner's choice. The daemon does not open such files; the owner does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from carma.cli.connection import connect
from carma.client import Client, Logs
from carma.errors import NotFound
from carma.wire.api_types import AttemptView, TaskView

LOOK_S = 0.2
CHUNK = 64 * 1024


def open_output(client: Client, task: int, *, stream: str, attempt: int | None, tail: int | None, follow: bool) -> Logs:
    """A task's output, from the daemon or, where it went elsewhere, from that file."""
    try:
        return client.open_logs(task, stream=stream, attempt=attempt, tail=tail, follow=follow)
    except NotFound:
        path = _path(client.task(task), stream, attempt)
        if path is None or not path.is_file():
            raise
    offset = 0 if tail is None else _tail_offset(path, tail)
    return Logs(offset, _read(path, offset, task, attempt, follow))


def _chosen(view: TaskView, attempt: int | None) -> AttemptView | None:
    wanted = [each for each in view.attempts if attempt in (None, each.number)]
    return wanted[-1] if wanted else None


def _path(view: TaskView, stream: str, attempt: int | None) -> Path | None:
    chosen = _chosen(view, attempt)
    name = "" if chosen is None else chosen.stderr if stream == "stderr" else chosen.stdout
    return Path(name) if name else None


def _tail_offset(path: Path, tail: int) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in (lines[:-tail] if tail else lines))


def _read(path: Path, offset: int, task: int, attempt: int | None, follow: bool) -> Iterator[bytes]:
    with path.open("rb") as file, connect() as client:
        file.seek(offset)
        while True:
            over = not follow or _ended(client.task(task), attempt)  # asked before reading: nothing comes after the end
            while piece := file.read(CHUNK):
                yield piece
            if over:
                return
            time.sleep(LOOK_S)


def _ended(view: TaskView, attempt: int | None) -> bool:
    chosen = _chosen(view, attempt)
    return view.state == "finished" or (chosen is not None and attempt is not None and chosen.ended_at is not None)
