"""`carma config`: every setting with its value and where it comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.verb import Verb, json_flag
from carma.errors import NotFound, Unreachable, Usage
from carma.wire.api_types import SettingView

if TYPE_CHECKING:
    from carma.config import Settings

EXAMPLES_SHOW = """
carma config show            the running daemon's settings
carma config show gate       one section
carma config show --local    what a daemon started now would have
"""


class ConfigVerbs(click.Group):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n  carma config show gate\n  carma config check carma.toml\n")


@click.group("config", cls=ConfigVerbs)
def command() -> None:
    """Show or check the settings: flags over environment over file over default."""


@command.command("show", cls=Verb, examples=EXAMPLES_SHOW)
@click.argument("part", required=False, metavar="[NAME]")
@click.option("--local", is_flag=True, help="Not the daemon's: those of the files and the environment.")
@click.option("-v", "--verbose", is_flag=True, help="With the sentence that says what each is for.")
@click.option("--origin", is_flag=True, hidden=True, help="Always shown.")
@json_flag
def show(part: str | None, local: bool, verbose: bool, origin: bool, as_json: bool) -> None:  # noqa: ARG001
    """Each setting with its value and its origin."""
    settings = _local() if local else _of_daemon()
    if part:
        settings = [each for each in settings if each.name == part or each.name.startswith(part + ".")]
        if not settings:
            raise NotFound(f"there is no setting or section {part!r}", "carma config show lists them all")
    if as_json:
        from carma.cli.output import print_json

        return print_json(settings)
    return _print(settings, verbose)


def _of_daemon() -> list[SettingView]:
    from carma.cli.connection import connect
    from carma.cli.error_output import note

    try:
        with connect() as client:
            return client.settings()
    except Unreachable:
        note("no daemon answers; these are the settings that one started now would have")
        return _local()


def _local() -> list[SettingView]:
    from carma.config import describe, load_settings
    from carma.paths import find_paths

    loaded = load_settings(find_paths(os.environ), os.environ)
    return [
        SettingView(name=line.name, value=line.value, origin=line.origin, description=line.description)
        for line in describe(*loaded)
    ]


def _print(settings: list[SettingView], verbose: bool) -> None:
    from carma.cli.output import Column, print_table

    rows = [[each.name, value_text(each.value), each.origin] for each in settings]
    if not verbose:
        return print_table([Column("SETTING"), Column("VALUE", flexible=True), Column("ORIGIN", flexible=True)], rows)
    for each in settings:
        click.echo(f"{each.name} = {value_text(each.value)}   ({each.origin})")
        click.echo(click.wrap_text(each.description, 80, "    ", "    "))
    return None


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "(none)"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)


@command.command("check", cls=Verb, examples="carma config check\ncarma config check /etc/carma/config.toml")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Say whether a settings file (without one: the usual files) can be used, and every mistake in it."""
    import msgspec

    from carma.config import load_settings
    from carma.paths import find_paths

    paths = find_paths(os.environ)
    if file is not None:
        if not file.is_file():
            raise Usage(f"there is no file {file}", "carma config check FILE")
        paths = msgspec.structs.replace(paths, config_file=file)
    check_names(load_settings(paths, os.environ).settings)
    there = paths.config_file.is_file()
    click.echo(f"{paths.config_file}: " + ("ok" if there else "not there; the defaults hold"))


def check_names(settings: Settings) -> None:
    """The policy and the memory sources that are named must be there and importable, as they must at a start."""
    from carma.plugins import ESTIMATORS, load_one, load_policy

    load_policy(settings.placement.policy)
    for name in settings.memory.sources:
        load_one(ESTIMATORS, name)
