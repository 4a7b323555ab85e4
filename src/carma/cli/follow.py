"""The output of a task's attempts, and following a task.

1. `open_output`, `output_of` and `whole_output`: output in pieces. The daemon opens the files that it made itself. A
   file that the user named with --output is opened here, as that user.
2. `both_now` and `both_of`: both streams, with a line where the stream changes.
3. `follow` and `wait_for`: the task's state on stderr, its output as it appears, its end. Ctrl-C detaches; the task
   continues.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import BinaryIO

import click

from carma.cli.connection import PersistentConnection, connect
from carma.cli.error_output import INTERRUPTED, complain
from carma.cli.wording import ending, exit_code_of, id_ranges
from carma.client import Client, Logs
from carma.errors import CarmaError, NotAllowed, NotFound, Unreachable
from carma.wire.api_types import AttemptView, TaskView

POLL_S = 1.0
OUTPUT_POLL_S = 0.2
CHUNK = 64 * 1024
TIMED_OUT = 124
STREAMS = ("stdout", "stderr")
_BEFORE = ("estimating", "queued", "recovering", "starting")
_BRIEF = ("", "Estimating", "Starting")  # reasons that usually pass at once


class Stop(threading.Event):
    """Ends, from another thread, the output that is followed."""

    _client: Client | None = None

    def watch(self, client: Client) -> None:
        """Output comes from this client now."""
        self._client = client

    def set(self) -> None:
        super().set()
        if self._client is not None:
            self._client.interrupt()


def open_output(
    client: Client,
    task: int,
    *,
    stream: str,
    attempt: int | None,
    tail: int | None,
    follow: bool,
    stop: Stop | None = None,
) -> Logs:
    """The output from the daemon, or from the file that the user named. `attempt` None: the newest."""
    try:
        return client.open_logs(task, stream=stream, attempt=attempt, tail=tail, follow=follow)
    except NotFound:
        chosen = [each for each in client.task(task).attempts if attempt in (None, each.number)]
        name = "" if not chosen else chosen[-1].stderr if stream == "stderr" else chosen[-1].stdout
        if not name or not _is_output(Path(name), task):
            raise
    offset = 0 if tail is None else _tail_offset(Path(name), tail)
    return Logs(
        offset, _read(Path(name), offset, task, attempt, lambda: not follow or (stop is not None and stop.is_set()))
    )


def _is_output(path: Path, task: int) -> bool:
    """Raises NotAllowed if this user may not read the file."""
    try:
        if not path.is_file():
            return False
        allowed = os.access(path, os.R_OK)
    except PermissionError:
        allowed = False
    if not allowed:
        hint = f"`carma show {task}` prints how the task ended"
        raise NotAllowed(f"cannot read the output of task {task}: {path}: permission denied", hint)
    return True


def _tail_offset(path: Path, tail: int) -> int:
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in (lines[:-tail] if tail else lines))


def _read(path: Path, offset: int, task: int, attempt: int | None, stopped: Callable[[], bool]) -> Iterator[bytes]:
    with path.open("rb") as file, connect() as client:
        file.seek(offset)
        while True:
            ended = stopped() or has_ended(
                client.task(task), attempt
            )  # checked before the read: if it has ended, this read is the last one
            while piece := file.read(CHUNK):
                yield piece
            if ended:
                return
            time.sleep(OUTPUT_POLL_S)


def has_ended(view: TaskView, attempt: int | None) -> bool:
    return view.state == "finished" or any(
        each.number == attempt and each.ended_at is not None for each in view.attempts
    )


def output_of(
    task: int,
    attempt: int,
    stream: str,
    tail: int | None = None,
    quiet: bool = False,
    stop: Stop | None = None,
) -> Iterator[bytes]:
    """One attempt's output until the attempt has ended. After a restart of the daemon it continues at the next byte."""
    connection = PersistentConnection(answered=True, quiet=quiet)
    stop = stop or Stop()
    position: int | None = None  # in the whole output; None: not opened yet
    while not stop.is_set():
        try:
            with connect() as client:
                stop.watch(client)
                before = _identity(client)
                rest = tail if position is None else None
                opened = open_output(client, task, stream=stream, attempt=attempt, tail=rest, follow=True, stop=stop)
                if stop.is_set():  # before the request could be interrupted
                    return
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
            time.sleep(OUTPUT_POLL_S)
        except Unreachable as error:
            connection.failed(error)


Pieces = Iterable[tuple[str, bytes]]  # with their streams


def both_now(client: Client, view: TaskView, attempt: int | None, tail: int | None) -> Iterator[bytes]:
    """stdout, then stderr: the files have no times."""
    chosen = [each for each in view.attempts if attempt in (None, each.number)]
    streams = STREAMS[:1] if chosen and _in_one_file(chosen[-1]) else STREAMS
    return headed(
        (stream, piece)
        for stream in streams
        for piece in open_output(client, view.id, stream=stream, attempt=attempt, tail=tail, follow=False).pieces
    )


def both_of(task: int, attempt: int, tail: int | None = None) -> Iterator[bytes]:
    """One attempt's streams until it has ended: as they arrive, or one after the other if it has ended already."""
    view = PersistentConnection(answered=True).ask(lambda client: client.task(task))
    one_file = any(each.number == attempt and _in_one_file(each) for each in view.attempts)
    streams = STREAMS[:1] if one_file else STREAMS
    outputs = [
        zip(repeat(stream), output_of(task, attempt, stream, tail, quiet=stream == "stderr")) for stream in streams
    ]
    return headed(chain(*outputs) if has_ended(view, attempt) else as_they_arrive(outputs))


def _in_one_file(attempt: AttemptView) -> bool:
    return attempt.stdout != "" and attempt.stdout == attempt.stderr


def as_they_arrive(outputs: Sequence[Pieces]) -> Iterator[tuple[str, bytes]]:
    """Each output has its own thread, because a client serves one thread."""
    arrived: queue.Queue[tuple[str, bytes] | Exception | None] = queue.Queue(maxsize=16)

    def read(output: Pieces) -> None:
        try:
            for each in output:
                arrived.put(each)
        except Exception as error:
            arrived.put(error)
        else:
            arrived.put(None)

    for output in outputs:
        threading.Thread(target=read, args=(output,), daemon=True).start()
    left = len(outputs)
    while left:
        item = arrived.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            left -= 1
        else:
            yield item


def headed(pieces: Pieces) -> Iterator[bytes]:
    """A line `==> stderr <==` where the stream changes, as `tail` prints it; the first stream is stdout."""
    current, last = STREAMS[0], b"\n"
    for stream, piece in pieces:
        if stream != current:
            yield (b"" if last.endswith(b"\n") else b"\n") + f"==> {stream} <==\n".encode()
        current, last = stream, piece
        yield piece


def whole_output(
    task: int, stream: str | None, tail: int | None, quiet: bool = False, stop: Stop | None = None
) -> Iterator[bytes]:
    """The newest attempt's output and that of all later attempts, until the task has ended. `stream` None: both."""
    connection = PersistentConnection(quiet=quiet)
    view, shown = connection.ask(lambda client: client.task(task)), 0
    while True:
        following = [each.number for each in view.attempts if each.number > shown]
        for number in following if shown else following[-1:]:
            rest = tail if not shown else None
            yield from output_of(task, number, stream, rest, quiet, stop) if stream else both_of(task, number, rest)
            shown = number
        if stop is not None and stop.is_set():
            return
        if view.state == "finished" and not any(each.number > shown for each in view.attempts):
            return
        view = connection.ask(lambda client: client.task(task, wait_s=OUTPUT_POLL_S))


def _identity(client: Client) -> tuple[int, float]:
    server = client.server()
    return server.pid, server.started_at


def follow(task: int, quiet: bool = False) -> int:
    """Follows all attempts of a task, also across restarts of the daemon. Returns the task's exit code."""
    try:
        view = _follow(task, quiet)
    except KeyboardInterrupt:
        return detached([task])
    if not quiet:
        complain(ending(view))
        if view.advice:
            complain(f"advice: {view.advice}")
    return exit_code_of(view)


def _follow(task: int, quiet: bool) -> TaskView:
    shown = 0  # attempts
    connection = PersistentConnection(answered=True, quiet=quiet)  # the daemon has just accepted the task
    while True:
        view = _until_started(connection, task, quiet, shown)
        for attempt in view.attempts[shown:]:
            if not quiet:
                where = ",".join(str(index) for index in view.gpu_indices)
                click.echo(f"carma: task {task} attempt {attempt.number} on GPU {where}", err=True)
            _copy_both(task, attempt, quiet)
        shown = max(shown, len(view.attempts))
        view = connection.ask(lambda client: client.task(task, wait_s=POLL_S))
        if view.state == "finished" and len(view.attempts) <= shown:
            return view


def _until_started(connection: PersistentConnection, task: int, quiet: bool, shown: int) -> TaskView:
    """Waits for the next attempt. Prints the reason of the wait when more than its numbers change."""
    said = ""
    view = connection.ask(lambda client: client.task(task))
    while view.state in _BEFORE and len(view.attempts) <= shown:
        words = re.sub(r"\d+", "", view.reason)
        if view.reason_code not in _BRIEF and words != said and not quiet:
            said = words
            complain(f"task {view.id} waits: {view.reason}")
        view = connection.ask(lambda client: client.task(task, wait_s=POLL_S / 4))
    return view


def _copy_both(task: int, attempt: AttemptView, quiet: bool) -> None:
    """Copies both streams of one attempt. Each has its own thread, because a client serves one thread."""
    other = threading.Thread(target=_copy_stderr, args=(task, attempt.number), daemon=True)
    if not _in_one_file(attempt):
        other.start()
    copy(output_of(task, attempt.number, "stdout", quiet=quiet), sys.stdout.buffer)
    if other.ident is not None:
        other.join(timeout=10.0)


def _copy_stderr(task: int, attempt: int) -> None:
    try:
        copy(output_of(task, attempt, "stderr", quiet=True), sys.stderr.buffer)
    except (CarmaError, OSError, ValueError) as error:
        complain(f"the task's stderr cannot be followed: {error}")


def copy(output: Iterable[bytes], target: BinaryIO) -> int:
    """Writes each piece at once. Returns the number of bytes."""
    written = 0
    for piece in output:
        target.write(piece)
        target.flush()
        written += len(piece)
    return written


def detached(tasks: Sequence[int], what: str = "detached") -> int:
    """The message and exit code after Ctrl-C."""
    ids = id_ranges(tasks)
    if len(tasks) == 1:
        complain(f"{what}; the task continues", f"`carma logs -f {ids}` follows it, `carma cancel {ids}` stops it")
    else:
        hint = f"`carma wait {ids}` waits for them, `carma cancel {ids}` stops them"
        complain(f"{what}; the tasks continue", hint)
    return INTERRUPTED


def wait_for(tasks: Sequence[int], timeout_s: float | None = None) -> int:
    """Waits for the end of all tasks. Returns their highest exit code, or 124 after `timeout_s`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    connection = PersistentConnection(until=until)
    highest = 0
    try:
        for task in tasks:
            view = _until_finished(connection, task, until)
            if view.state != "finished":
                complain(f"task {task} has not ended within the timeout", f"it continues: carma show {task}")
                return TIMED_OUT
            highest = max(highest, exit_code_of(view))
    except KeyboardInterrupt:
        return detached(tasks, "stopped waiting")
    return highest


def _until_finished(connection: PersistentConnection, task: int, until: float | None) -> TaskView:
    view = connection.ask(lambda client: client.task(task))  # an unknown task is an error at once
    if view.state == "finished":
        return view
    remaining_s = None if until is None else max(0.0, until - time.monotonic())
    return connection.ask(lambda client: client.wait(task, remaining_s))
