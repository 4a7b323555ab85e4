"""`carma up --detach`: the daemon in the background, and a caller that knows whether the daemon has started.

The child is forked before heavy modules are imported. It reports over a pipe: null once it serves the socket, or the
error that ended it. The caller prints that error and returns its exit code, as if the daemon had run in the foreground.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from carma.errors import CarmaError, Unreachable, from_code
from carma.wire.api_types import Problem

START_LIMIT_S = 60.0


def in_background(serve: Callable[[Callable[[], None]], int], log_file: Path) -> None:
    """Fork; the child runs `serve(ready)`. Raises the error that ended its start.

    Raises OSError if the log cannot be opened.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    lines = os.open(
        log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )  # opened here, so that the caller gets the error
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        _become_daemon(serve, lines, writer)
    os.close(lines)
    os.close(writer)
    os.waitpid(middle, 0)
    try:
        _await_report(reader, log_file)
    finally:
        os.close(reader)


def _become_daemon(serve: Callable[[Callable[[], None]], int], lines: int, writer: int) -> None:
    """The child's part. Forks once more, so that no process has to wait for the daemon's end; never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        _redirect(lines)
        code = serve(lambda: _send(writer, None))
    except CarmaError as error:  # reported first: the log may be on a full disk
        _send(writer, Problem(code=error.code, message=str(error), hint=error.hint))
        code = error.exit_code
        with contextlib.suppress(OSError):
            print(f"carma: {error}", file=sys.stderr)
    except BaseException as error:
        _send(writer, Problem(code=CarmaError.code, message=f"{type(error).__name__}: {error}"))
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(lines: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(lines, 1)
    os.dup2(lines, 2)
    for spare in {nothing, lines} - {0, 1, 2}:
        os.close(spare)


def _send(writer: int, report: Problem | None) -> None:
    """The first report is read; later ones are lost, because the caller has ended."""
    with contextlib.suppress(OSError):
        os.write(writer, msgspec.json.encode(report))
        os.close(writer)


def _await_report(reader: int, log_file: Path) -> None:
    readable, _, _ = select.select([reader], [], [], START_LIMIT_S)
    if not readable:
        raise Unreachable(
            f"the daemon does not answer after {START_LIMIT_S:g} s", f"it may still start; its log is {log_file}"
        )
    data = os.read(reader, 1 << 16)
    if not data:
        raise CarmaError("the daemon ended while it was starting", f"its log is {log_file}")
    problem = msgspec.json.decode(data, type=Problem | None)
    if problem is not None:
        raise from_code(problem.code, problem.message, problem.hint)
