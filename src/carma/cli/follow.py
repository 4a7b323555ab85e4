"""Following a task: its state on stderr, its output as it is written, its end. Ctrl-C detaches; the task goes on."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import click

from carma.cli.error_output import INTERRUPTED, complain
from carma.cli.reconnect import Steady, output_of
from carma.cli.wording import ending, exit_code_of, spans
from carma.errors import CarmaError
from carma.wire.api_types import AttemptView, TaskView

LOOK_S = 1.0
_BEFORE = ("estimating", "queued", "recovering", "starting")
_AT_ONCE = ("", "Estimating", "Starting")


def follow(task: int, quiet: bool = False) -> int:
    """Until the end, over all its attempts, and over a restart of the daemon; the task's exit code."""
    try:
        view = _follow(task, quiet)
    except KeyboardInterrupt:
        return detached([task])
    if not quiet:
        complain(ending(view))
    return exit_code_of(view)


def _follow(task: int, quiet: bool) -> TaskView:
    seen = 0
    steady = Steady(answered=True, quiet=quiet)  # it has just taken the task
    while True:
        view = _until_started(steady, task, quiet, seen)
        for attempt in view.attempts[seen:]:
            if not quiet:
                where = ",".join(str(index) for index in view.gpu_indices)
                click.echo(f"carma: task {task} attempt {attempt.number} on GPU {where}", err=True)
            _copy_both(task, attempt, quiet)
        seen = max(seen, len(view.attempts))
        view = steady.ask(lambda client: client.task(task, wait_s=LOOK_S))
        if view.state == "finished" and len(view.attempts) <= seen:
            return view


def _until_started(steady: Steady, task: int, quiet: bool, seen: int) -> TaskView:
    """Says why it waits, when the reason changes by more than its numbers; what passes at once is not worth a line."""
    said = ""
    view = steady.ask(lambda client: client.task(task))
    while view.state in _BEFORE and len(view.attempts) <= seen:
        words = re.sub(r"\d+", "", view.reason)
        if view.reason_code not in _AT_ONCE and words != said and not quiet:
            said = words
            complain(f"task {view.id} waits: {view.reason}")
        view = steady.ask(lambda client: client.task(task, wait_s=LOOK_S / 4))
    return view


def _copy_both(task: int, attempt: AttemptView, quiet: bool) -> None:
    """Both streams of one attempt, each to its own; a client is for one thread."""
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
    """As it comes; how many bytes there were."""
    written = 0
    for piece in output:
        target.write(piece)
        target.flush()
        written += len(piece)
    return written


def detached(tasks: Sequence[int]) -> int:
    """What Ctrl-C says: the tasks go on, and how to come back."""
    ids = spans(tasks)
    goes = "the task goes on" if len(tasks) == 1 else "the tasks go on"
    back = f"carma logs -f {ids}" if len(tasks) == 1 else f"carma wait {ids}"
    complain(f"detached; {goes}", f"`{back}` returns, `carma cancel {ids}` ends {'it' if len(tasks) == 1 else 'them'}")
    return INTERRUPTED


def wait_for(tasks: Sequence[int], timeout_s: float | None = None) -> int:
    """The highest exit code of them all; 124 when the time is over first."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    steady = Steady(until=until)
    highest = 0
    try:
        for task in tasks:
            view = _until_over(steady, task, until)
            if view.state != "finished":
                complain(f"task {task} has not ended within the time given", f"it goes on: carma show {task}")
                return 124
            highest = max(highest, exit_code_of(view))
    except KeyboardInterrupt:
        return detached(tasks)
    return highest


def _until_over(steady: Steady, task: int, until: float | None) -> TaskView:
    view = steady.ask(lambda client: client.task(task))  # a task that is not there is an error at once
    if view.state == "finished":
        return view
    return steady.ask(lambda client: client.wait(task, None if until is None else max(0.0, until - time.monotonic())))
