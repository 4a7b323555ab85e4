"""One place where errors become a line on stderr, a hint and an exit code. A traceback only with CARMA_DEBUG=1."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import click

from carma.errors import CarmaError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # as `> FILE` on a full disk: what is written to has no name here
USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


_NO_WORDS: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())  # from 8.2 on


class _Nowhere(io.RawIOBase):
    """In place of a stream that is closed (`>&-`): takes everything, and remembers that there was something."""

    met = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.met = True
        return len(data)


def is_closed(stream: TextIO) -> bool:
    """Whether it was closed before we began; what is written to it goes nowhere."""
    return _nowhere(stream) is not None


def _nowhere(stream: TextIO) -> _Nowhere | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Nowhere) else None


def _prepare_streams() -> None:
    """Streams that can always be written: a closed one goes nowhere, a character it does not have becomes a `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(_Nowhere()), encoding="utf-8", errors="replace"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def guarded(call: Callable[[], Any]) -> int:
    """Run it; whatever happens, the answer is an exit code."""
    _prepare_streams()
    try:
        code = int(call() or 0)
        sys.stdout.flush()
        nowhere = _nowhere(sys.stdout)
        return code or int(nowhere is not None and nowhere.met)
    except BrokenPipeError:
        return _hush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("CARMA_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, CarmaError):
        complain(str(error), error.hint)
        return error.exit_code
    if isinstance(error, _NO_WORDS):  # `carma trace`: what there is, as --help prints it
        click.echo(error.format_message(), err=True)
        return USAGE
    if isinstance(error, click.ClickException):
        complain(_lower(error.format_message()), _help_hint(error))
        return USAGE if isinstance(error, click.UsageError) else error.exit_code
    if isinstance(error, OSError):
        complain(_of_system(error))
        return 1
    complain(
        f"internal error: {type(error).__name__}: {error}",
        "run it again with CARMA_DEBUG=1 to see where; please report it",
    )
    return 1


def _of_system(error: OSError) -> str:
    """In words, without its number."""
    why = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {why}"
    return f"the output cannot be written: {why}" if error.errno in FULL else why


def complain(message: str, hint: str = "") -> None:
    """`carma: message`, and on a second line what to do next. Several mistakes are several lines."""
    for line in message.splitlines() or [""]:
        _say("carma: ", line)
    if hint:
        _say("  hint: ", hint)


def note(message: str) -> None:
    """Something worth knowing that is not an error; stderr, so that stdout stays for results."""
    _say("carma: note: ", message)


def _say(label: str, text: str) -> None:
    """One line; on a terminal it is folded between words, where other programs would have to put it together again."""
    line = label + _one_line(text)
    if sys.stderr.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size((80, 24)).columns
        line = textwrap.fill(line, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    click.echo(line, err=True)


def _one_line(text: str) -> str:
    """Without control characters: a message may quote a path or a reason that another user chose."""
    from carma.cli.output import safe

    return safe(" ".join(text.split()))


def _lower(message: str) -> str:
    message = message.rstrip(".")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message


def _help_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    if ctx is None or ctx.parent is None:
        return ""
    return f"{ctx.command_path} --help has the flags and an example"


def _hush() -> int:
    """The reader went away (`carma queue | head`): say nothing, also not when the interpreter closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
