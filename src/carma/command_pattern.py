"""Patterns of commands: two commands with the same pattern differ only in numbers."""

from __future__ import annotations

import re
from typing import NamedTuple

BLANK = "#"
# A number is a whole word (`64`) or the part after the last equals sign of a word (`--batch-size=64`,
# `trainer.batch=64`). A digit inside a name (resnet50, config2.yaml) is part of the name.
_NUMBER = re.compile(r"(?P<before>(?:.*=)?)(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL)


class Number(NamedTuple):
    place: int  # index of its word in the command
    value: float
    name: str  # the option before it ("--batch-size"), or "" if there is none


def pattern(command: tuple[str, ...]) -> tuple[str, ...]:
    """The words, with `#` in place of each number."""
    return tuple(f"{found['before']}{BLANK}" if (found := _NUMBER.fullmatch(word)) else word for word in command)


def numbers(command: tuple[str, ...]) -> tuple[Number, ...]:
    found: list[Number] = []
    for place, word in enumerate(command):
        match = _NUMBER.fullmatch(word)
        if match is not None:
            found.append(Number(place, float(match["number"]), match["before"][:-1] or _option_before(command, place)))
    return tuple(found)


def _option_before(command: tuple[str, ...], place: int) -> str:
    before = command[place - 1] if place else ""
    return before if before.startswith("-") and not _NUMBER.fullmatch(before) else ""
