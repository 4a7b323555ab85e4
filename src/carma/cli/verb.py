"""The parts that verbs share: the command classes, renamed options, and the options for tasks, tables and JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from carma.cli.completion_items import task_id_items, task_name_items
from carma.cli.option_types import ID, IDS, Function

AFTER_DASHES = "carma.after_dashes"


class Verb(click.Command):
    """A command whose help ends with examples that can be pasted."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples.strip("\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n")
        formatter.write("".join(f"  {line}\n" for line in self.examples.splitlines()))


class VerbGroup(Verb, click.Group):
    """A group of verbs with examples."""


class CommandVerb(Verb):
    """A verb that takes a command. The words after `--` stay as they are and never count as options of CARMA."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[AFTER_DASHES] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)


class Renamed(click.Option):
    """An option with earlier names, which scripts may still use. Help does not show them."""

    def __init__(self, declarations: Sequence[str], *, was: Sequence[str], **given: Any) -> None:
        super().__init__(declarations, **given)
        self.was = tuple(was)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.was]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


def verb(name: str, *, examples: str, **kwargs: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator of a verb. The function returns its exit code; None means 0."""
    return click.command(name, cls=kwargs.pop("cls", Verb), examples=examples, **kwargs)


def command_verb(name: str, *, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator of a verb that takes a command."""
    return verb(name, cls=CommandVerb, examples=examples, context_settings={"allow_interspersed_args": False})


command_words = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")


def _flatten(_ctx: click.Context, _param: click.Parameter, value: tuple[list[int], ...]) -> list[int]:
    return list(dict.fromkeys(task for span in value for task in span))


def task_ids(required: bool = True) -> Callable[[Function], Function]:
    return click.argument(
        "ids", nargs=-1, required=required, type=IDS, callback=_flatten, metavar="ID...", shell_complete=task_id_items
    )


class Chosen(NamedTuple):
    """The tasks that the user names. `which` describes those that the verb can change."""

    which: str
    ids: list[int]
    name: str | None
    everything: bool


def chosen_tasks(which: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """IDs, --name or --all, for verbs that change tasks, as one argument `chosen` for `connection.for_chosen`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*, ids: list[int], name: str | None, everything: bool, **given: Any) -> Any:
            return function(Chosen(which, ids, name, everything), **given)

        by_name = click.option(
            "-n", "--name", metavar="NAME", shell_complete=task_name_items, help="Select tasks by name."
        )
        command = by_name(command)
        command = click.option("--all", "everything", is_flag=True, help=f"All your {which}.")(command)
        return task_ids(required=False)(command)

    return decorate


task_id = click.argument("task", type=ID, metavar="ID", shell_complete=task_id_items)


def json_flag(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="Print the API's answer as JSON, unabridged.")(function)


class Listing(NamedTuple):
    """How to print a list."""

    as_json: bool
    header: bool
    wide: bool


def table_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of verbs that print a table, as one argument `listing`."""

    @functools.wraps(function)
    def command(*, as_json: bool, no_header: bool, wide: bool, **given: Any) -> Any:
        return function(listing=Listing(as_json, not no_header, wide), **given)

    command = click.option("-w", "--wide", is_flag=True, help="Do not cut columns to the terminal width.")(command)
    command = click.option("--no-header", is_flag=True, help="Print the rows without the header.")(command)
    return json_flag(command)


def user_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user of the listed tasks, as one argument `owner`. None: the caller; all: every user."""

    @functools.wraps(function)
    def command(*, user: str | None, everybody: bool, **given: Any) -> Any:
        return function(owner="all" if everybody else user, **given)

    command = click.option("-a", "--all", "everybody", is_flag=True, help="Short for -u all.")(command)
    return click.option("-u", "--user", metavar="NAME", help="Tasks of this user; `all`: of all users.")(command)
