"""A command with its numbers taken out: two that have the same pattern run the same program with other figures."""

from __future__ import annotations

import re
from typing import NamedTuple

BLANK = "#"
# The whole word (`64`) or all behind its last equals sign (`--batch-size=64`, `trainer.batch=64`). A digit in a name
# (resnet50, config2.yaml) tells which thing is meant, not how much of it.
_NUMBER = re.compile(r"(?P<before>(?:.*=)?)(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL)


class Number(NamedTuple):
    place: int  # of its word in the command
    value: float
    name: str  # the option that it belongs to, as far as one can tell: "--batch-size"; "" where none is before it


def pattern(command: tuple[str, ...]) -> tuple[str, ...]:
    """The words, with a blank for each number."""
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
