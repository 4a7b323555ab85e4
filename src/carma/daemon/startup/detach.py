"""`carma up --detach`: the daemon in the background, and a caller who knows whether it came up.

The child is forked before anything heavy is loaded. It answers over a pipe: "ready" once the socket is served, or the
error that ended it, so that the caller prints that error and returns its exit code as if it had run in front.
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

from carma.core.model.values import Record
from carma.errors import CarmaError, Unreachable, from_code

START_LIMIT_S = 60.0


class Report(Record, frozen=True, kw_only=True):
    ready: bool
    pid: int = 0
    code: str = ""
    message: str = ""
    hint: str = ""


def in_background(serve: Callable[[Callable[[], None]], int], log_file: Path) -> int:
    """Fork; the child runs `serve(ready)`. Returns the daemon's pid, or raises what ended its start.

    Raises OSError if the log cannot be opened.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    lines = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # here, so that the caller gets the error
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        _become_daemon(serve, lines, writer)
    os.close(lines)
    os.close(writer)
    os.waitpid(middle, 0)
    try:
        return _await_report(reader, log_file)
    finally:
        os.close(reader)


def _become_daemon(serve: Callable[[Callable[[], None]], int], lines: int, writer: int) -> None:
    """In the child. Forks once more, so that nobody has to wait for the daemon's end; never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        _redirect(lines)

        def ready() -> None:
            _tell(writer, Report(ready=True, pid=os.getpid()))

        code = serve(ready)
    except CarmaError as error:  # the caller is told first: the log may be on a full disk
        _tell(writer, Report(ready=False, code=error.code, message=str(error), hint=error.hint))
        code = error.exit_code
        with contextlib.suppress(OSError):
            print(f"carma: {error}", file=sys.stderr)
    except BaseException as error:
        _tell(writer, Report(ready=False, code="internal", message=f"{type(error).__name__}: {error}"))
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


def _tell(writer: int, report: Report) -> None:
    """Once; later reports go nowhere, because the caller has left."""
    with contextlib.suppress(OSError):
        os.write(writer, msgspec.json.encode(report))
        os.close(writer)


def _await_report(reader: int, log_file: Path) -> int:
    readable, _, _ = select.select([reader], [], [], START_LIMIT_S)
    if not readable:
        raise Unreachable(
            f"the daemon does not answer after {START_LIMIT_S:g} s", f"it may still come up; its log is {log_file}"
        )
    data = os.read(reader, 1 << 16)
    if not data:
        raise CarmaError("the daemon ended while it was starting", f"its log is {log_file}")
    report = msgspec.json.decode(data, type=Report)
    if not report.ready:
        raise from_code(report.code, report.message, report.hint)
    return report.pid
