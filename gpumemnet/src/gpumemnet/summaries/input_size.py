"""The image that a table was made with, where a line below it tells only how many megabytes its input has.

The first convolution's weights tell how many channels it takes, and its output about how large the image is. Together
with the megabytes that leaves one square image, or nothing is said.
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
_HALF = 0.0051  # two digits are shown
_LEAST_MB = 0.25  # of fewer the digits say too little


def square_image(first: Layer, batch: int, input_mb: float | None) -> Shape:
    """With the batch that the table was printed with; empty where the figures leave more than one, or none."""
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
    if len(found) > 1:  # as many megabytes as are shown: the one that a stride divides
        found = {(channels, side) for channels, side in found if side % high == 0}
    return next(((batch, channels, side, side) for channels, side in found), ()) if len(found) == 1 else ()


def _kernels(first: Layer) -> Iterator[tuple[int, int]]:
    """Channels taken and the kernel's side, with a bias or without."""
    made = first.output[1]
    for side in range(1, _MOST_SIDE + 1):
        taken, rest = divmod(first.parameters, made * side * side)
        if 1 <= taken <= _MOST_CHANNELS and rest in (0, made):
            yield taken, side


def _sides(elements: float, share_off: float) -> range:
    """Of squares of about so many elements."""
    least = max(1, int(elements * (1 - share_off)))
    return range(isqrt(least - 1) + 1, isqrt(int(elements * (1 + share_off))) + 1)


def _may_make(side: int, kernel: int, high: int) -> bool:
    """Whether some stride, up to the kernel's side, and some padding, up to half of it, give an output so high."""
    strides = range(1, kernel + 1)
    return any((side - kernel) // stride < high <= (side + kernel - kernel % 2) // stride + 1 for stride in strides)
