"""Following a task: its state on stderr, its output as it appears, its end. Ctrl-C detaches; the task continues."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import click

from carma.cli.connection import PersistentConnection
from carma.cli.error_output import INTERRUPTED, complain
from carma.cli.task_output import output_of
from carma.cli.wording import ending, exit_code_of, id_ranges
from carma.errors import CarmaError
from carma.wire.api_types import AttemptView, TaskView

POLL_S = 1.0
TIMED_OUT = 124
_BEFORE = ("estimating", "queued", "recovering", "starting")
_BRIEF = ("", "Estimating", "Starting")  # reasons that usually pass at once


def follow(task: int, quiet: bool = False) -> int:
    """Follows all attempts of a task, also across restarts of the daemon. Returns the task's exit code."""
    try:
        view = _follow(task, quiet)
    except KeyboardInterrupt:
        return detached([task])
    if not quiet:
        complain(ending(view))
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
    if attempt.stderr != attempt.stdout or not attempt.stdout:
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


def detached(tasks: Sequence[int]) -> int:
    """The message and exit code after Ctrl-C."""
    ids = id_ranges(tasks)
    if len(tasks) == 1:
        complain("detached; the task continues", f"`carma logs -f {ids}` follows it, `carma cancel {ids}` stops it")
    else:
        complain("detached; the tasks continue", f"`carma wait {ids}` waits for them, `carma cancel {ids}` stops them")
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
        return detached(tasks)
    return highest


def _until_finished(connection: PersistentConnection, task: int, until: float | None) -> TaskView:
    view = connection.ask(lambda client: client.task(task))  # an unknown task is an error at once
    if view.state == "finished":
        return view
    remaining_s = None if until is None else max(0.0, until - time.monotonic())
    return connection.ask(lambda client: client.wait(task, remaining_s))
