"""Flags that name a file for results: looked at when they are read, long before there is anything to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from carma.cli.verb import Function
from carma.errors import CarmaError, Usage

STDOUT = "-"  # as in carma.outfile
FORCE = "Write over a file that holds something else."


def _checked(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        from carma.outfile import check_file

        check_file(value, param.opts[0])
    return value


def file_flag(flag: str, text: str) -> Callable[[Function], Function]:
    return click.option(flag, metavar="FILE", callback=_checked, help=text)


def force_flag(function: Function) -> Function:
    return click.option("--force", is_flag=True, help=FORCE)(function)


def check_run_file(typed: str, force: bool) -> None:
    """An earlier run may be written over; anything else is somebody's work."""
    from carma.outfile import holds_something
    from carma.sim.record import read

    if force or not holds_something(typed):
        return
    try:
        read(Path(typed))
    except CarmaError:
        raise Usage(
            f"{typed} is there and holds something else than a run", "Name another file, or add --force."
        ) from None


def say_written(typed: str | None) -> None:
    """Last of all, on standard error; nothing where it went to standard output."""
    if typed is not None and typed != STDOUT:
        click.echo(typed, err=True)
