"""The output of a task's attempts, in pieces.

The daemon opens the files that it made itself. A file that the user named with --output is opened here, as that user.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from carma.cli.connection import PersistentConnection, connect
from carma.client import Client, Logs
from carma.errors import NotFound, Unreachable
from carma.wire.api_types import TaskView

POLL_S = 0.2
CHUNK = 64 * 1024


def open_output(client: Client, task: int, *, stream: str, attempt: int | None, tail: int | None, follow: bool) -> Logs:
    """The output from the daemon, or from the file that the user named. `attempt` None: the newest."""
    try:
        return client.open_logs(task, stream=stream, attempt=attempt, tail=tail, follow=follow)
    except NotFound:
        chosen = [each for each in client.task(task).attempts if attempt in (None, each.number)]
        name = "" if not chosen else chosen[-1].stderr if stream == "stderr" else chosen[-1].stdout
        if not name or not Path(name).is_file():
            raise
    offset = 0 if tail is None else _tail_offset(Path(name), tail)
    return Logs(offset, _read(Path(name), offset, task, attempt, follow))


def _tail_offset(path: Path, tail: int) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in (lines[:-tail] if tail else lines))


def _read(path: Path, offset: int, task: int, attempt: int | None, follow: bool) -> Iterator[bytes]:
    with path.open("rb") as file, connect() as client:
        file.seek(offset)
        while True:
            ended = not follow or has_ended(client.task(task), attempt)  # before the read, which then is the last
            while piece := file.read(CHUNK):
                yield piece
            if ended:
                return
            time.sleep(POLL_S)


def has_ended(view: TaskView, attempt: int | None) -> bool:
    return view.state == "finished" or any(
        each.number == attempt and each.ended_at is not None for each in view.attempts
    )


def output_of(task: int, attempt: int, stream: str, tail: int | None = None, quiet: bool = False) -> Iterator[bytes]:
    """One attempt's output until the attempt has ended. After a restart of the daemon it continues at the next byte."""
    connection = PersistentConnection(answered=True, quiet=quiet)
    position: int | None = None  # in the whole output; None: not opened yet
    while True:
        try:
            with connect() as client:
                before = _identity(client)
                rest = tail if position is None else None
                opened = open_output(client, task, stream=stream, attempt=attempt, tail=rest, follow=True)
                connection.succeeded()
                begin = opened.offset or 0
                position = begin if position is None else max(position, begin)
                skip = position - begin
                for piece in opened.pieces:
                    fresh, skip = piece[skip:], max(0, skip - len(piece))
                    position += len(fresh)
                    if fresh:
                        yield fresh
                # A daemon that shuts down closes its streams early; the same daemon afterwards has sent everything.
                if has_ended(client.task(task), attempt) and _identity(client) == before:
                    return
            time.sleep(POLL_S)
        except Unreachable as error:
            connection.failed(error)


def whole_output(task: int, stream: str, tail: int | None) -> Iterator[bytes]:
    """The newest attempt's output and that of all later attempts, until the task has ended."""
    connection = PersistentConnection()
    view, shown = connection.ask(lambda client: client.task(task)), 0
    while True:
        following = [each.number for each in view.attempts if each.number > shown]
        for number in following if shown else following[-1:]:
            yield from output_of(task, number, stream, tail if not shown else None)
            shown = number
        if view.state == "finished" and not any(each.number > shown for each in view.attempts):
            return
        view = connection.ask(lambda client: client.task(task, wait_s=POLL_S))


def _identity(client: Client) -> tuple[int, float]:
    server = client.server()
    return server.pid, server.started_at
