"""Compares the figures below a table of layers (totals, trained parameters, the input's size) with its rows.

A shortened table has the total of the whole one: then its rows contain too little.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from gpumemnet.summaries.shapes import Shape, show
from gpumemnet.summaries.text import bad, read_count

_FIGURE = re.compile(r"\s*(Total|Trainable|Non-trainable|Optimizer) params:\s*([\d,]+)")
_INPUT = re.compile(r"\s*Input size \(MB\):\s*(\d{1,12}\.\d\d)\s*", re.ASCII)
_MOST_OFF = 0.01  # of the total; shared weights make small differences
MEGABYTES = (1e6, float(1 << 20))  # torchinfo's and torchsummary's megabyte
_NUMBER = (4,)  # bytes
_WORD = (4, 8, 16, 24)  # also with a mask and token types beside the words


class Figures(NamedTuple):
    total: int | None = None
    trained: int | None = None
    frozen: int = 0  # parameters that are not trained
    optimizer: int = 0  # Keras also counts the optimizer's variables
    input_mb: float | None = None


def read_figures(lines: Sequence[str]) -> Figures:
    counts: dict[str, int | None] = {}
    input_mb = None
    for line in lines:
        if found := _FIGURE.match(line):
            counts.setdefault(found[1], read_count(found[2]))
        elif sized := _INPUT.fullmatch(line):
            input_mb = float(sized[1])
    return Figures(
        counts.get("Total"),
        counts.get("Trainable"),
        counts.get("Non-trainable") or 0,
        counts.get("Optimizer") or 0,
        input_mb,
    )


def check_total(counted: int, total: int | None, header: int, line: str) -> tuple[str, ...]:
    """A remark if the parameters of the rows differ from the total; an error if most are missing."""
    if not total:
        return ()
    said = f"the rows below have {counted:,} parameters, the total says {total:,}"
    if counted < total / 2:
        raise bad(header, line, f"{said}: rows are missing")
    if abs(counted - total) <= _MOST_OFF * total:
        return ()
    why = "rows are missing" if counted < total else "weights are shared"
    return (f"the rows of the table have {counted:,} parameters, its total says {total:,}: {why}, or it was changed",)


def input_of(told: Shape, sample: Shape, batch: int, input_mb: float | None) -> tuple[Shape, tuple[str, ...]]:
    """The input with its batch, and a remark about --input (`sample`) if a table has outputs already. `told` is the
    table's own input; the batch is that of the table."""
    if not sample:
        return told, ()
    if told and told[1:] != sample:
        counts = f"the table is that of an input of {show(told[1:])}, and that counts: --input {show(sample)} does not"
        return told, (counts,)
    if not told and input_mb and not _fits(sample, batch, input_mb):
        said = f"--input {show(sample)} is not what the table was made with, an input of {input_mb:.2f} MB"
        return (batch, *sample), (f"{said}; the outputs that count are the table's",)
    return told or (batch, *sample), ()


def _fits(sample: Shape, batch: int, input_mb: float) -> bool:
    """As far as two decimal places show."""
    elements = prod((batch, *sample))
    each = _WORD if len(sample) == 1 else _NUMBER
    return any(abs(elements * size / unit - input_mb) <= 0.0051 for size in each for unit in MEGABYTES)
