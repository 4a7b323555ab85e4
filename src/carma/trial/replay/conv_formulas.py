"""Workspaces of cuDNN's engines for a convolution, as formulas derived from measurements on an H200.

cuDNN does not publish them. Each formula is what such an engine must hold, and each gives thousands (or hundreds) of
measured workspaces to within some hundred bytes, which are the engine's own pointers:

- copies in the other layout: image, output and weight ("x", "y", "w"), the channels of each group padded to a multiple;
- a weight gradient's partial sums, one per image of the batch, in fp32;
- Winograd with tiles of 4x4 outputs; FFT over the whole image, and over tiles of 32x32.

A name is a sum of parts: "xyw@8" is three copies with channels padded to 8, capitals are copies in fp32, "xyw@1+fft"
is the copies and the FFT, "+more" means that a tree gives what is added (partial tiles of a split reduction).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from carma.trial.replay.conv_shapes import ConvShape

NONE, MORE, OTHER = "zero", "more", "other"
FP32_BYTES, COMPLEX_BYTES = 4, 8
FFT_SIDE = 32  # of a tile

Part = Callable[[ConvShape], int]


def formula_bytes(name: str, shape: ConvShape) -> int:
    return sum(_part(part)(shape) for part in name.split("+") if part not in (NONE, MORE))


def _part(name: str) -> Part:
    if "@" in name:
        letters, pad = name.split("@")
        return partial(_copies, letters, int(pad))
    return _PARTS[name]


def _copies(letters: str, pad: int, shape: ConvShape) -> int:
    c, k = (-(-channels // pad) * pad for channels in shape.group_channels)
    n, groups = shape.image[0], shape.groups
    items = {
        "x": n * groups * c * prod(shape.image[2:]),
        "y": n * groups * k * prod(shape.output[2:]),
        "w": groups * c * k * prod(shape.weight[2:]),
    }
    return sum(items[letter.lower()] * (shape.item_bytes if letter.islower() else FP32_BYTES) for letter in letters)


def _sums_per_image(shape: ConvShape) -> int:
    return FP32_BYTES * shape.image[0] * prod(shape.weight)


def _winograd(shape: ConvShape) -> int:
    c, k = shape.group_channels
    tiles = shape.image[0] * prod(-(-side // 4) for side in shape.output[2:])
    points = prod(side + 3 for side in shape.weight[2:])
    return FP32_BYTES * points * shape.groups * (tiles * (c + k) + c * k)


def _fft_tiles(shape: ConvShape) -> int:
    """Two tiles of each image at a time."""
    c, k = shape.group_channels
    sides = zip(shape.image[2:], shape.weight[2:], strict=True)
    tiles = prod(-(-side // max(1, FFT_SIDE + 1 - kernel)) for side, kernel in sides)
    at_once = shape.image[0] * min(2, tiles)
    return COMPLEX_BYTES * _frequencies(FFT_SIDE) * shape.groups * (c * k + (c + k) * at_once)


def _fft(shape: ConvShape) -> int:
    """Image and weight, each before and after its transposition, and a copy of the weight."""
    c, k = shape.group_channels
    planes = shape.groups * (c * k + shape.image[0] * c)
    return 2 * COMPLEX_BYTES * _whole(shape) * planes + FP32_BYTES * prod(shape.weight)


def _fft_weight(shape: ConvShape) -> int:
    """The same for image and output, and a copy of the output."""
    planes = shape.image[0] * (shape.image[1] + shape.output[1])
    return 2 * COMPLEX_BYTES * _whole(shape) * planes + FP32_BYTES * prod(shape.output)


def _whole(shape: ConvShape) -> int:
    side = 16
    while side < max(a + b - 1 for a, b in zip(shape.image[2:], shape.weight[2:], strict=True)):
        side *= 2
    return _frequencies(side)


def _frequencies(side: int) -> int:
    """Number of frequencies of real numbers on a square: half of them, and one column."""
    return side * (side // 2 + 1)


def _columns(shape: ConvShape) -> int:
    """The patches of the whole batch (im2col)."""
    return shape.image[0] * _columns_of_one(shape)


def _columns_of_one(shape: ConvShape) -> int:
    return shape.item_bytes * shape.image[1] * prod(shape.weight[2:]) * prod(shape.output[2:])


def _offsets(shape: ConvShape) -> int:
    """A table with the places of each output pixel's inputs."""
    return 4 * prod(shape.output[2:]) * prod(shape.weight[2:])


_PARTS: dict[str, Part] = {
    "sums": _sums_per_image,
    "winograd": _winograd,
    "fft32": _fft_tiles,
    "fft": _fft,
    "fftw": _fft_weight,
    "columns": _columns,
    "columns1": _columns_of_one,
    "offsets": _offsets,
}
