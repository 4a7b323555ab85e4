"""Shared by the readers of summaries: headers, numbers and shapes, and errors with their line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from carma.errors import Usage

WHOLE = "Save all of it, down to its last line."
SHAPES = (
    "--input is one sample, channels first, like 3x224x224, or a number of words, like 128. Where the model calls its "
    "modules in another order than they are printed in, a table of torchinfo tells the shapes."
)
HINT = "It takes what torchinfo, torchsummary, print(model) or Keras' model.summary() show, or an ONNX file."
MOST_LAYERS = 100_000  # ten times as many as in any model that is trained
CACHED = 4096  # shapes, counts and attributes repeat, so each is parsed once
_SHAPE = re.compile(r"\[\s*(-?\d{1,12}(?:\s*,\s*-?\d{1,12})*)?\s*\]", re.ASCII)
_COUNT = re.compile(r"\d{1,3}(?:,\d{3}){1,6}|\d{1,18}", re.ASCII)


def bad(number: int, line: str, why: str, hint: str = HINT) -> Usage:
    """An error at a line; `number` counts from 0, the message from 1."""
    return Usage(f"line {number + 1} of the model summary: {why}: {line.strip()[:120]!r}", hint)


def cut_off(number: int, line: str, what: str) -> Usage:
    """An error: `what` begins in this line and does not end."""
    return bad(number, line, f"{what} is not closed; the text has been cut off", WHOLE)


def too_many(number: int, line: str) -> Usage:
    return bad(number, line, f"more than {MOST_LAYERS:,} layers")


def counted(count: int, what: str) -> str:
    """`1 place`, `12,000 places`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def first_names(names: Iterable[str]) -> str:
    """The first three different ones."""
    return ", ".join(list(dict.fromkeys(names))[:3])


def is_header(line: str) -> bool:
    """Whether a line is the header of a table; a terminal may have cut off the last columns of a box of Keras."""
    return line.lstrip(" \t┃│|").startswith("Layer (type") and ("Param" in line or "┃" in line)


def is_rule(line: str) -> bool:
    """A line of dashes between the head of a table and its rows, or at its end."""
    return not line.strip(" \t=-_") and len(line.strip()) >= 8


def has_inner(depths: Sequence[int]) -> list[bool]:
    """Whether inner rows follow each row of a table."""
    return [below > depth for depth, below in zip(depths, [*depths[1:], 0], strict=True)]


@lru_cache(CACHED)
def read_shape(text: str) -> tuple[int, ...] | None:
    """The first shape in it: `[32, 64, 7, 7]`, or the first of `[[-1, 5, 8], [-1, 8]]`; None if there is none."""
    found = _SHAPE.search(text)
    if not found:
        return None
    return tuple(int(size) for size in (found[1] or "").split(",") if size.strip())


@lru_cache(CACHED)
def read_count(text: str) -> int | None:
    """`25,557,032` or `0`; of a frozen layer in brackets: `(9,408)`. None if it is no number."""
    plain = text.strip().strip("()")
    return int(plain.replace(",", "")) if _COUNT.fullmatch(plain) else None
