"""`--watch`: prints a table again and again until Ctrl-C.

On a terminal the table stays in place on the alternate screen: each line is overwritten, so that nothing flickers.
Elsewhere the tables follow each other, with an empty line and the time between them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from carma.cli.option_types import number
from carma.cli.verb import Listing
from carma.errors import Unreachable, Usage

USUAL_S = 2.0
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"  # alternate screen without a cursor
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\033[H", "\033[K", "\033[J"


def watch_flag(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option of verbs that print a table; such a verb has an argument `listing`."""

    @functools.wraps(function)
    def command(*, watch_s: float | None, listing: Listing, **given: Any) -> Any:
        if watch_s is None:
            return function(listing=listing, **given)
        if listing.as_json:
            raise Usage("--json excludes --watch", "`carma events --json` prints changes as they happen")
        return watch(lambda: function(listing=listing, **given), watch_s)

    return click.option(
        "--watch",
        "watch_s",
        type=number(0.2, 86_400),
        is_flag=False,
        flag_value=str(USUAL_S),
        metavar="[SECONDS]",
        help=f"Print it again at this interval (default {USUAL_S:g}) until Ctrl-C.",
    )(command)


def watch(show: Callable[[], object], interval_s: float) -> None:
    """An absent daemon is an error at first, and later only a line."""
    in_place = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    try:
        text = _text(show)
        if in_place:
            sys.stdout.write(_ENTER)
        while True:
            sys.stdout.write(_screen(text) if in_place else f"{_clock()}\n{text}\n")
            sys.stdout.flush()
            time.sleep(interval_s)
            try:
                text = _text(show)
            except Unreachable as error:
                text = f"{error}; trying again\n"
    except KeyboardInterrupt:
        return
    finally:
        if in_place:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


class _Captured(io.StringIO):
    """Text for stdout: as wide and as coloured as there."""

    def __init__(self, isatty: bool) -> None:
        super().__init__()
        self._isatty = isatty

    def isatty(self) -> bool:
        return self._isatty


def _text(show: Callable[[], object]) -> str:
    """What it prints, notes included."""
    made = _Captured(sys.stdout.isatty())
    with contextlib.redirect_stdout(made), contextlib.redirect_stderr(made):
        show()
    return made.getvalue()


def _screen(text: str) -> str:
    """The text over the previous one, cut to the height of the terminal."""
    lines, most = [_clock(), *text.splitlines()], shutil.get_terminal_size((80, 24)).lines
    if len(lines) > most:
        lines = [*lines[: most - 1], f"… and {len(lines) - most + 1:,} more lines"]
    return _HOME + f"{_END_OF_LINE}\n".join(lines) + _END_OF_LINE + _END_OF_SCREEN
