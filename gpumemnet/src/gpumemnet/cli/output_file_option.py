"""Options that name a file or a directory for results. The place is checked before the results are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from carma.cli.option_types import Function, Parsed
from carma.errors import Usage

STDOUT = "-"  # as in gpumemnet.output_file
FORCE = "Write over a file that holds something else."


def _checked(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        from gpumemnet.output_file import check_file

        check_file(value, param.opts[0])
    return value


def file_flag(flag: str, text: str) -> Callable[[Function], Function]:
    return click.option(flag, metavar="FILE", callback=_checked, help=text)


def _folder(text: str) -> Path:
    """click's own type takes an empty name for the working directory."""
    if not text:
        raise ValueError("it is an empty name")
    return Path(text)


def folder_flag(text: str, **more: Any) -> Callable[[Function], Function]:
    return click.option("--out", type=Parsed("dir", _folder), metavar="DIR", help=text, **more)


def force_flag(function: Function) -> Function:
    return click.option("--force", is_flag=True, help=FORCE)(function)


def check_made(typed: str, force: bool) -> None:
    """Refuses to overwrite anything but a page or a picture that CARMA has made, unless --force is given."""
    from gpumemnet.output_file import check_file, holds_something, made_here

    check_file(typed)
    if not force and holds_something(typed) and not made_here(typed):
        raise Usage(f"{typed} is there and was not made by CARMA", "Name another place, or add --force.")


def check_pictures(out: Path, files: Iterable[str], force: bool) -> None:
    """Refuses, before the plots are computed, a directory without write access and files that CARMA has not made."""
    from gpumemnet.directories import check_folder

    check_folder(out)
    for file in files if out.is_dir() else ():
        check_made(str(out / file), force)


def check_page(html: str | None, force: bool, as_json: bool) -> None:
    if html == STDOUT and as_json:
        raise Usage("--html - and --json both write to standard output", "Leave out one of them.")
    if html is not None and html != STDOUT:
        check_made(html, force)


def say_written(typed: str | None) -> None:
    """Prints the name of the written file on standard error, unless the file is standard output."""
    if typed is not None and typed != STDOUT:
        click.echo(typed, err=True)
