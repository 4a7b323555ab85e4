"""`carma config`: print or check the settings."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from carma.cli.connection import ask
from carma.cli.error_output import note
from carma.cli.output import Column, Field, print_json, print_records
from carma.cli.verb import Verb, VerbGroup, json_flag
from carma.client import Client
from carma.config import Settings, describe, load_settings
from carma.errors import NotFound, Unreachable, Usage
from carma.paths import find_paths
from carma.plugins import ESTIMATORS, load_one, load_policy
from carma.wire.api_types import SettingView

EXAMPLES_SHOW = """
carma config show            settings of the running daemon
carma config show gate       settings of one section
carma config show --local    settings that a daemon started now would have
"""


@click.group("config", cls=VerbGroup, examples="carma config show gate\ncarma config check carma.toml")
def command() -> None:
    """Print or check the settings. Order: flags, environment, file, default."""


@command.command("show", cls=Verb, examples=EXAMPLES_SHOW)
@click.argument("part", required=False, metavar="[NAME]")
@click.option("--local", is_flag=True, help="Read the files and the environment; do not ask the daemon.")
@click.option("-v", "--verbose", is_flag=True, help="Print the description of each setting.")
@click.option("--origin", is_flag=True, hidden=True, help="Without effect: the origin is always shown.")
@json_flag
def show(part: str | None, local: bool, verbose: bool, origin: bool, as_json: bool) -> None:  # noqa: ARG001
    """Settings with their values and origins."""
    settings = _local() if local else _of_daemon()
    if part:
        settings = [each for each in settings if each.name == part or each.name.startswith(part + ".")]
        if not settings:
            raise NotFound(f"there is no setting or section {part!r}", "`carma config show` lists all settings")
    if as_json:
        return print_json(settings)
    if not verbose:
        return print_records(FIELDS, settings)
    for each in settings:
        click.echo(f"{each.name} = {value_text(each.value)}   ({each.origin})")
        click.echo(click.wrap_text(each.description, 80, "    ", "    "))
    return None


def _of_daemon() -> list[SettingView]:
    try:
        return ask(Client.settings)
    except Unreachable:
        note("no daemon answers; these are the settings that a daemon started now would have")
        return _local()


def _local() -> list[SettingView]:
    return [
        SettingView(name=line.name, value=line.value, origin=line.origin, description=line.description)
        for line in describe(*load_settings(find_paths(os.environ), os.environ))
    ]


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "(none)"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)


FIELDS: tuple[Field[SettingView], ...] = (
    (Column("SETTING"), lambda each: each.name),
    (Column("VALUE", flexible=True), lambda each: value_text(each.value)),
    (Column("ORIGIN", flexible=True), lambda each: each.origin),
)


@command.command("check", cls=Verb, examples="carma config check\ncarma config check /etc/carma/config.toml")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Check a settings file, or the usual files, and print every mistake."""
    paths = find_paths(os.environ)
    if file is not None:
        if not file.is_file():
            raise Usage(f"there is no file {file}", "give the path of a settings file: carma config check FILE")
        paths = msgspec.structs.replace(paths, config_file=file)
    check_names(load_settings(paths, os.environ).settings)
    click.echo(f"{paths.config_file}: " + ("ok" if paths.config_file.is_file() else "no such file; defaults apply"))


def check_names(settings: Settings) -> None:
    """Raises unless the policy and the memory sources in the settings can be imported, as at the start of a daemon."""
    load_policy(settings.placement.policy)
    for name in settings.memory.sources:
        load_one(ESTIMATORS, name)
