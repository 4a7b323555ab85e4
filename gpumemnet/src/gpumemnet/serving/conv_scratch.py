"""Size of cuDNN's workspace ("scratch") for each convolution of a described model.

The replay of trial runs uses the same table of measured workspaces. A model summary rarely contains kernel sizes and
strides; for common convolutions they follow from the number of weights and the sizes of input and output. Otherwise the
workspace counts as 0.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from math import isqrt, prod

from carma.trial.layers.description import Described
from carma.trial.replay.conv_shapes import BF16, FORWARD, FP16, INPUT_GRAD, TF32, WEIGHT_GRAD, ConvShape
from carma.trial.replay.conv_workspaces import shipped_convolutions

_CONVOLUTION = re.compile(r"Conv(Transpose)?[123]d")
_ATTRIBUTES = ("groups", "kernel_size", "stride", "padding", "dilation")
_NO_ATTRIBUTES = (None,) * len(_ATTRIBUTES)
_NUMBERS = re.compile(r"\d+")
NONE = (0, 0, 0)
_SHORTCUT_SPAN = 14  # maximum number of layers between the beginning and the end of a shortcut

Scratch = tuple[int, int, int]  # bytes of the forward pass, of the gradient of the input, and of that of the weights


def scratch_of(described: Described) -> list[Scratch]:
    """The workspaces of each layer; a loss does not count as a layer."""
    layers = [layer for layer in described.layers if not layer.kind.endswith("Loss")] or described.layers
    if not any(map(_is_convolution, {layer.kind for layer in layers})):
        return [NONE] * len(layers)
    how = (*_precision(described), described.channels_last)
    found: list[Scratch] = []
    before: deque[Sizes] = deque([described.input] if described.input else [], maxlen=_SHORTCUT_SPAN)
    for layer in layers:
        scratch = NONE
        if layer.output and _is_convolution(layer.kind):
            # If the input is unknown, it is the latest earlier output that matches the weights. With a shortcut, that
            # is not always the output of the layer before.
            transposed = "Transpose" in layer.kind
            attributes = tuple(map(layer.attributes.get, _ATTRIBUTES)) if layer.attributes else _NO_ATTRIBUTES
            for input_size in layer.inputs[:1] or reversed(before):
                workspaces = _workspaces(*how, transposed, layer.parameters, layer.output, input_size, attributes)
                if workspaces is not None:
                    scratch = workspaces
                    break
        found.append(scratch)
        if layer.output:
            before.append(layer.output)
    return found


@lru_cache(maxsize=4096)
def _is_convolution(kind: str) -> bool:
    return _CONVOLUTION.fullmatch(kind) is not None


def _precision(described: Described) -> tuple[int, int]:
    kind = described.autocast or described.dtype
    if kind == "bfloat16":
        return BF16, 2
    return (FP16, 2) if kind == "float16" else (TF32, 4)


Sizes = tuple[int, ...]


def _sizes(
    parameters: int, output_size: Sizes, input_size: Sizes, transposed: bool, attributes: tuple[str | None, ...]
) -> tuple[Sizes, Sizes, Sizes, Sizes, Sizes, Sizes, int] | None:
    """Image, weight, output, stride, padding, dilation, groups. A transposed convolution computes the
    input gradient of a plain one, so its output takes the place of the image."""
    in_groups, kernel_size, strides, paddings, dilations = attributes
    image, output = (output_size, input_size) if transposed else (input_size, output_size)
    rank = len(output) - 2
    if rank < 1 or len(image) != len(output) or not prod(image):
        return None
    groups = int(in_groups or 1)
    numbers = (parameters, parameters - output_size[1])  # number of weights without a bias, and with one
    kernel = _numbers(kernel_size, rank) or _kernel(numbers, image[1] * output[1], groups, rank)
    if kernel is None or image[1] % groups:
        return None
    sides = zip(image[2:], output[2:], strict=True)
    stride = _numbers(strides, rank) or tuple(max(1, round(one / two)) for one, two in sides)
    padding = _numbers(paddings, rank) or tuple(side // 2 for side in kernel)
    weight = (output[1], image[1] // groups, *kernel)
    if prod(weight) not in numbers:
        return None
    return image, weight, output, stride, padding, _numbers(dilations, rank) or (1,) * rank, groups


def _numbers(text: str | None, rank: int) -> Sizes | None:
    found = tuple(map(int, _NUMBERS.findall(text or "")))
    return found if len(found) == rank else found * rank if len(found) == 1 else None


def _kernel(numbers: Sizes, channels: int, groups: int, rank: int) -> Sizes | None:
    """A square kernel with this many weights."""
    for weights in numbers:
        if weights <= 0:  # a layer that is called again has no weights of its own
            continue
        area, rest = divmod(weights * groups, channels)
        side = isqrt(area) if rank == 2 else round(area ** (1 / rank))
        if not rest and area and side**rank == area:
            return (side,) * rank
    return None


@lru_cache(maxsize=4096)  # networks repeat layers
def _workspaces(
    precision: int,
    item: int,
    channels_last: bool,
    transposed: bool,
    parameters: int,
    output_size: Sizes,
    input_size: Sizes,
    attributes: tuple[str | None, ...],
) -> Scratch | None:
    """None if no kernel matches the weights and the two sizes."""
    sizes = _sizes(parameters, output_size, input_size, transposed, attributes)
    if sizes is None:
        return None
    scratch_bytes = shipped_convolutions().scratch_bytes
    shape = ConvShape(FORWARD, precision, item, channels_last, False, False, *sizes).with_two_dimensions()
    forward, back, weights = (
        scratch_bytes(shape._replace(direction=one)) for one in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
    )
    return (back, forward, weights) if transposed else (forward, back, weights)
