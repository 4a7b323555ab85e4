"""The figures below a table of layers: totals, trained parameters, the size of the input.

1. Compares the totals with the rows. A shortened table has the total of the whole one: then rows are missing.
2. Finds the input image of a table that contains only its size in megabytes. The first convolution's weights determine
   its input channels, its output the approximate size of the image. Together with the megabytes this leaves one square
   image, or none is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isqrt, prod
from typing import NamedTuple

from carma.trial.layers.description import Layer
from gpumemnet.summaries.shapes import Shape, show
from gpumemnet.summaries.text import bad, read_count

_FIGURE = re.compile(r"\s*(Total|Trainable|Non-trainable|Optimizer) params:\s*([\d,]+)")
_INPUT = re.compile(r"\s*Input size \(MB\):\s*(\d{1,12}\.\d\d)\s*", re.ASCII)
_MOST_OFF = 0.01  # of the total; shared weights make small differences
_MEGABYTES = (1e6, float(1 << 20))  # torchinfo's and torchsummary's megabyte
_NUMBER_BYTES = (4,)
_WORD_BYTES = (4, 8, 16, 24)  # also with a mask and token types beside the words
_ROUNDING_MB = 0.0051  # two decimal places are shown
_CONVOLUTION = re.compile(r"\w*Conv2d\w*")
_MOST_CHANNELS = 4  # colours and one more
_MOST_SIDE = 64  # of a kernel: patches are the largest
_LEAST_MB = 0.25  # of smaller ones the decimal places are too inexact


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
    problem = f"the rows below have {counted:,} parameters, the total says {total:,}"
    if counted < total / 2:
        raise bad(header, line, f"{problem}: rows are missing")
    if abs(counted - total) <= _MOST_OFF * total:
        return ()
    why = "rows are missing" if counted < total else "weights are shared"
    return (f"the rows of the table have {counted:,} parameters, its total says {total:,}: {why}, or it was changed",)


def input_of(printed: Shape, sample: Shape, batch: int, input_mb: float | None) -> tuple[Shape, tuple[str, ...]]:
    """The input with its batch, and a remark if --input (`sample`) contradicts the table. `printed` and `batch` are
    those of the table."""
    if not sample:
        return printed, ()
    if printed and printed[1:] != sample:
        ignored = (
            f"the table was made with an input of {show(printed[1:])}, which is used; --input {show(sample)} is ignored"
        )
        return printed, (ignored,)
    if not printed and input_mb and not _fits(sample, batch, input_mb):
        problem = f"--input {show(sample)} differs from the input of the table, which has {input_mb:.2f} MB"
        return (batch, *sample), (f"{problem}; the outputs of the table are used",)
    return printed or (batch, *sample), ()


def _fits(sample: Shape, batch: int, input_mb: float) -> bool:
    """Whether the figures agree as far as two decimal places show."""
    elements = prod((batch, *sample))
    each = _WORD_BYTES if len(sample) == 1 else _NUMBER_BYTES
    return any(abs(elements * size / unit - input_mb) <= _ROUNDING_MB for size in each for unit in _MEGABYTES)


def square_image(first: Layer, batch: int, input_mb: float | None) -> Shape:
    """The square image that the totals imply, with the batch of the table; empty if the figures leave several images,
    or none."""
    if not input_mb or input_mb < _LEAST_MB or len(first.output) != 4 or not _CONVOLUTION.fullmatch(first.kind):
        return ()
    high, wide = first.output[2:]
    found = {
        (channels, side)
        for channels, kernel in _kernels(first)
        for megabyte in _MEGABYTES
        for side in _sides(input_mb * megabyte / (4 * batch * channels), _ROUNDING_MB / input_mb)
        if high == wide and _may_make(side, kernel, high)
    }
    if len(found) > 1:  # of equal sizes the one that a stride divides
        found = {(channels, side) for channels, side in found if side % high == 0}
    return next(((batch, channels, side, side) for channels, side in found), ()) if len(found) == 1 else ()


def _kernels(first: Layer) -> Iterator[tuple[int, int]]:
    """Input channels and the kernel's side, with or without a bias."""
    made = first.output[1]
    for side in range(1, _MOST_SIDE + 1):
        taken, rest = divmod(first.parameters, made * side * side)
        if 1 <= taken <= _MOST_CHANNELS and rest in (0, made):
            yield taken, side


def _sides(elements: float, share_off: float) -> range:
    """Sides of squares with about this number of elements."""
    least = max(1, int(elements * (1 - share_off)))
    return range(isqrt(least - 1) + 1, isqrt(int(elements * (1 + share_off))) + 1)


def _may_make(side: int, kernel: int, high: int) -> bool:
    """Whether a stride up to the kernel's side and a padding up to half of it give this output height."""
    strides = range(1, kernel + 1)
    return any((side - kernel) // stride < high <= (side + kernel - kernel % 2) // stride + 1 for stride in strides)
