"""The input image of a table whose last lines contain only its size in megabytes.

The first convolution's weights determine its input channels, its output the approximate size of the image. Together
with the megabytes this leaves one square image, or none is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isqrt

from carma.trial.layers.description import Layer
from gpumemnet.summaries.shapes import Shape
from gpumemnet.summaries.totals import MEGABYTES

_CONVOLUTION = re.compile(r"\w*Conv2d\w*")
_MOST_CHANNELS = 4  # colours and one more
_MOST_SIDE = 64  # of a kernel: patches are the largest
_BYTES = 4
_HALF = 0.0051  # two decimal places are shown
_LEAST_MB = 0.25  # of smaller ones the decimal places are too inexact


def square_image(first: Layer, batch: int, input_mb: float | None) -> Shape:
    """With the batch of the table; empty if the figures leave several images, or none."""
    if not input_mb or input_mb < _LEAST_MB or len(first.output) != 4 or not _CONVOLUTION.fullmatch(first.kind):
        return ()
    high, wide = first.output[2:]
    found = {
        (channels, side)
        for channels, kernel in _kernels(first)
        for megabyte in MEGABYTES
        for side in _sides(input_mb * megabyte / (_BYTES * batch * channels), _HALF / input_mb)
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
