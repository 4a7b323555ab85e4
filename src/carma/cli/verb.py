"""What all verbs share: the command class with its examples, the options that read verbs have, task ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
DIGITS = 15  # of a whole number, at most


class Verb(click.Command):
    """A command whose help ends in examples that can be pasted."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples.strip("\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write_paragraph()
        formatter.write("Examples:\n")
        formatter.write("".join(f"  {line}\n" for line in self.examples.splitlines()))


class Renamed(click.Option):
    """A flag that had another name, which scripts may still use and no help shows."""

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
    """A verb's decorator; the function returns its exit code, or None for 0."""
    return click.command(name, cls=kwargs.pop("cls", Verb), examples=examples, **kwargs)


class Whole(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A whole number between two; what is wrong with another is said in words."""

    name = "n"

    def __init__(self, least: int, most: int | None) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,99}", text):
            self.fail(f"{str(value)!r} is not a whole number", param, ctx)
        too_long = len(text.lstrip("+-0")) > DIGITS
        if too_long or not self.least <= int(text) <= (10**DIGITS if self.most is None else self.most):
            shown = text if too_long else str(int(text))
            self.fail(f"{shown} is not possible; it must be {self._within(too_long)}", param, ctx)
        return int(text)

    def _within(self, too_long: bool) -> str:
        most = 10**DIGITS - 1 if self.most is None and too_long else self.most
        return f"at least {self.least}" if most is None else f"between {self.least:,} and {most:,}"


def whole(least: int, most: int | None = None) -> Whole:
    return Whole(least, most)


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number between two, and one that is: click's own lets `nan` pass, which is below and above nothing."""

    name = "x"

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?\s*", str(value), re.IGNORECASE):
            self.fail(f"{str(value)!r} is not a number", param, ctx)
        number = float(value)
        if not self.least <= number <= self.most:
            within = f"between {self.least:,g} and {self.most:,g}"
            self.fail(f"{value!s} is not possible; it must be {within}", param, ctx)
        return number


def number(least: float, most: float) -> Number:
    return Number(least, most)


class Names(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`tasks,oom`: some of these names."""

    name = "names"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        if not words:
            self.fail(f"no name was given; there are {', '.join(self.known)}", param, ctx)
        for word in words:
            if word not in self.known:
                self.fail(f"there is no {word!r}; there are {', '.join(self.known)}", param, ctx)
        return tuple(dict.fromkeys(words))


class TaskIds(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`12`, or `40-49` for a span of them."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        match = re.fullmatch(r"#?([0-9]{1,15})(?:-([0-9]{1,15}))?", str(value))
        if match is None:
            self.fail(f"{str(value)!r} is not a task id; `carma queue` lists them", param, ctx)
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < first + 10_000:
            self.fail(f"{str(value)!r} is not a span of at most 10,000 ids, written 40-49", param, ctx)
        return list(range(first, last + 1))


class TaskNumber(TaskIds):
    """One id."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        ids = super().convert(value, param, ctx)
        if len(ids) != 1:
            self.fail(f"{value!r}: one task id is wanted", param, ctx)
        return ids[0]


def _flatten(_ctx: click.Context, _param: click.Parameter, value: tuple[list[int], ...]) -> list[int]:
    return list(dict.fromkeys(task for span in value for task in span))


def task_ids(required: bool = True) -> Callable[[Function], Function]:
    return click.argument("ids", nargs=-1, required=required, type=TaskIds(), callback=_flatten, metavar="ID...")


def chosen_tasks(which: str) -> Callable[[Function], Function]:
    """Ids, --name or --all, for verbs that change tasks; `for_chosen` finds them."""

    def decorate(function: Function) -> Function:
        function = click.option("-n", "--name", metavar="NAME", help=f"Your tasks of this name {which}.")(function)
        function = click.option("--all", "everything", is_flag=True, help=f"All your tasks {which}.")(function)
        return task_ids(required=False)(function)

    return decorate


def task_id(function: Function) -> Function:
    return click.argument("task", type=TaskNumber(), metavar="ID")(function)


def json_flag(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="JSON, as the API gives it; nothing is cut.")(function)


def table_flags(function: Function) -> Function:
    """The options of verbs that print a table."""
    function = click.option("-w", "--wide", is_flag=True, help="Do not cut columns to the terminal's width.")(function)
    function = click.option("--no-header", is_flag=True, help="Rows only.")(function)
    return json_flag(function)
