"""Errors and notes on stderr, and exit codes.

1. `guarded` runs a command and turns every error into a message with a hint, and an exit code.
2. `complain` and `note` print one message.

CARMA_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import click

from carma.errors import CarmaError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
_NO_ARGUMENTS: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2


class _ClosedStream(io.BytesIO):
    """Stands in for a stream that was closed at the start (`>&-`). Discards the data and records its use."""

    was_used = False

    def write(self, data: Any, /) -> int:
        self.was_used = True
        return len(data)


def is_closed(stream: TextIO) -> bool:
    """Whether the stream was closed at the start."""
    return isinstance(getattr(stream, "buffer", None), _ClosedStream)


def _prepare_streams() -> None:
    """Makes stdout and stderr always writable. A character outside of a stream's encoding becomes a `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(_ClosedStream(), encoding="utf-8", errors="replace"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def guarded(call: Callable[[], Any]) -> int:
    """Runs the call and returns an exit code in every case."""
    _prepare_streams()
    try:
        code = _exit_code(call)
        sys.stdout.flush()
        return code or int(getattr(getattr(sys.stdout, "buffer", None), "was_used", False))
    except BrokenPipeError:  # `carma queue | head`
        _discard_output()
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("CARMA_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        _discard_output()
        return _report(error)


def _exit_code(call: Callable[[], Any]) -> int:
    try:
        return int(call() or 0)
    except click.exceptions.Exit as ended:
        return ended.exit_code


def _discard_output() -> None:
    """Discards output that cannot be written. Otherwise the interpreter would report it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception) -> int:
    if isinstance(error, CarmaError):
        complain(str(error), error.hint)
        return error.exit_code
    if isinstance(error, _NO_ARGUMENTS):  # a group without a verb: the message is its help
        click.echo(error.format_message(), err=True)
        return USAGE
    if isinstance(error, click.ClickException):
        complain(click_message(error), _help_hint(error))
        return USAGE if isinstance(error, click.UsageError) else error.exit_code
    if isinstance(error, OSError):
        complain(_system_message(error))
        return 1
    hint = "run it again with CARMA_DEBUG=1 for the traceback, and report it"
    complain(f"internal error: {type(error).__name__}: {error}", hint)
    return 1


def _system_message(error: OSError) -> str:
    why = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {why}"
    return f"the output cannot be written: {why}" if error.errno in FULL_DISK else why


def complain(message: str, hint: str = "") -> None:
    """Prints `carma: message`, one line for each line of the message, and the hint."""
    for line in message.splitlines() or [""]:
        _print("carma: ", line)
    if hint:
        _print("  hint: ", hint)


def note(message: str) -> None:
    """Prints information that is no error; on stderr, because stdout is for results."""
    _print("carma: note: ", message)


def _print(label: str, text: str) -> None:
    """One line, wrapped on a terminal. Without control characters: the text may quote another user."""
    from carma.cli.output import safe

    line = label + safe(" ".join(text.split()))
    if sys.stderr.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size((80, 24)).columns
        line = textwrap.fill(line, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    click.echo(line, err=True)


def click_message(error: click.ClickException) -> str:
    """The message of click in the form of ours: one line, without a capital and a full stop."""
    message = " ".join(error.format_message().split()).rstrip(".")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message


def _help_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    return "" if ctx is None or ctx.parent is None else f"`{ctx.command_path} --help` lists the options"
