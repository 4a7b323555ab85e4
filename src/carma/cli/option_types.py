"""Types of option values. Each type reads a text; its error shows the text and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from carma.cli import parsers as parse
from carma.cli.error_output import note
from carma.core.model.units import parse_mib
from carma.errors import Usage

if TYPE_CHECKING:
    from carma.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_WHOLE = 10**15 - 1
MAX_IDS = 10_000  # of one range
SMALL_TASK_MIB = 200  # the context of a process alone takes 200 to 600 MiB


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A value that `read` makes from a text. `read` raises ValueError with a message for the user."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def whole(least: int, most: int | None = None) -> Parsed:
    """A whole number between two bounds, both included."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,99}\s*", text):
            raise ValueError(f"{text!r} is not a whole number")
        limit = MAX_WHOLE if most is None else most
        if not least <= int(text) <= limit:
            allowed = f"at least {least}" if most is None and int(text) < least else f"between {least:,} and {limit:,}"
            raise ValueError(f"{int(text)} is out of range: it must be {allowed}")
        return int(text)

    return Parsed("N", read)


def number(least: float, most: float) -> Parsed:
    """A finite number between two bounds, both included. (click.FloatRange accepts nan.)"""

    def read(text: str) -> float:
        if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?\s*", text, re.IGNORECASE):
            raise ValueError(f"{text!r} is not a number")
        if not least <= float(text) <= most:
            raise ValueError(f"{text} is out of range: it must be between {least:,g} and {most:,g}")
        return float(text)

    return Parsed("X", read)


def duration(least_s: float) -> Parsed:
    """A duration in seconds, with a lower bound."""

    def read(text: str) -> float:
        seconds = parse.parse_grace(text)
        if seconds < least_s:
            raise ValueError(f"{text!r} is too short: it must be at least {least_s:g}s; write for example 120s or 5m")
        return seconds

    return Parsed("TIME", read)


def names(known: tuple[str, ...]) -> Parsed:
    """Some of the known names, separated by commas: `tasks,oom`."""

    def read(text: str) -> tuple[str, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if unknown := [word for word in words if word not in known] or ([] if words else [text]):
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return tuple(dict.fromkeys(words))

    return Parsed("NAMES", read)


def non_empty(name: str) -> Parsed:
    """A text that is not empty."""
    return Parsed(name, parse.parse_text)


def _ids(text: str) -> list[int]:
    match = re.fullmatch(r"#?([0-9]{1,15})(?:-([0-9]{1,15}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a task ID; `carma queue` lists the IDs")
    first = int(match[1])
    last = int(match[2] or first)
    if not first <= last < first + MAX_IDS:
        raise ValueError(f"{text!r} is not a range of at most {MAX_IDS:,} task IDs; write for example 40-49")
    return list(range(first, last + 1))


def _id(text: str) -> int:
    ids = _ids(text)
    if len(ids) != 1:
        raise ValueError(f"{text!r} is a range; this command takes one task ID")
    return ids[0]


def _gpu_memory(text: str) -> int:
    mib = parse_mib(text)
    if mib < SMALL_TASK_MIB:
        meant = f"; did you mean {text.strip()}GiB?" if re.fullmatch(r"\s*[0-9.]+\s*", text) else ""
        note(f"--gpu-mem {text.strip()} is {mib} MiB, less than the CUDA context of a task{meant}")
    return mib


ID = Parsed("ID", _id)
SIZE = Parsed("SIZE", parse_mib)  # in MiB
GPU_MEMORY = Parsed("SIZE", _gpu_memory)  # of a task, in MiB
TIME = Parsed("TIME", parse.parse_grace)  # in seconds
IDS = Parsed("ID", _ids)  # `12`, or the range `40-49`


def read_pairs(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> dict[str, object]:
    """The values of a repeated `--set NAME=VALUE`."""
    found: dict[str, object] = {}
    for pair in value:
        name, equals, setting = pair.partition("=")
        if not equals or "." not in name:
            raise Usage(
                f"--set {pair!r} is not a setting with a value",
                "write for example --set gate.sm_active=0.7; `carma config show` lists the settings",
            )
        found[name.strip()] = setting
    return found


def _past(text: str) -> str:
    parse.parse_past(text)
    return text  # parsed again with the daemon's clock by `since_at`


def since_flag(about: str) -> Callable[[Function], Function]:
    return click.option("-S", "--since", type=Parsed("TIME", _past), help=about)


def since_at(client: Client, text: str | None) -> float | None:
    """The time of `--since` by the daemon's clock, which runs faster than real time for virtual GPUs."""
    if text is None:
        return None
    try:
        return parse.parse_past(text, client.server().now)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'-S' / '--since'") from None
