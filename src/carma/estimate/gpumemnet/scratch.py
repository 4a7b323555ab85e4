"""What cuDNN takes for each convolution while it runs, by the model that trial runs are replayed with.

A summary seldom tells kernels and strides; weights and sizes do, for the usual ones. Where they do not, nothing is
said.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import isqrt, prod

from carma.estimate.described import Described, Layer
from carma.estimate.trace.conv_shapes import BF16, FORWARD, FP16, INPUT_GRAD, TF32, WEIGHT_GRAD, ConvShape
from carma.estimate.trace.conv_workspaces import shipped_convolutions

_CONVOLUTION = re.compile(r"Conv[123]d")
_NUMBERS = re.compile(r"\d+")
NONE = (0, 0, 0)

Scratch = tuple[int, int, int]  # bytes forward, for the gradient of the input, and of the weights


def scratch_of(described: Described) -> list[Scratch]:
    """Of each layer. A loss that is a module is no layer."""
    layers = [layer for layer in described.layers if not layer.kind.endswith("Loss")] or described.layers
    precision, item = _precision(described)
    found: list[Scratch] = []
    before: tuple[int, ...] = described.input
    for layer in layers:
        if _CONVOLUTION.fullmatch(layer.kind) and layer.output:
            shape = _sizes(layer, layer.inputs[0] if layer.inputs else before)
            found.append(NONE if shape is None else _asked(precision, item, described.channels_last, *shape))
        else:
            found.append(NONE)
        before = layer.output or before
    return found


def _precision(described: Described) -> tuple[int, int]:
    kind = described.autocast or described.dtype
    if kind == "bfloat16":
        return BF16, 2
    return (FP16, 2) if kind == "float16" else (TF32, 4)


Sizes = tuple[int, ...]


def _sizes(layer: Layer, image: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes, Sizes, Sizes, int] | None:
    """Image, weight, output, stride, padding, dilation, groups; one dimension is run as two."""
    output, rank = layer.output, len(layer.output) - 2
    if rank < 1 or len(image) != len(output) or not prod(image):
        return None
    told = layer.attributes
    groups = int(told.get("groups", "1"))
    kernel = _numbers(told.get("kernel_size"), rank) or _kernel(layer, image, groups, rank)
    if kernel is None or image[1] % groups:
        return None
    stride = _numbers(told.get("stride"), rank) or tuple(
        max(1, round(one / two)) for one, two in zip(image[2:], output[2:], strict=True)
    )
    padding = _numbers(told.get("padding"), rank) or tuple(side // 2 for side in kernel)
    dilation = _numbers(told.get("dilation"), rank) or (1,) * rank
    weight = (output[1], image[1] // groups, *kernel)
    if rank > 1:
        return image, weight, output, stride, padding, dilation, groups
    flat = [(*shape[:2], 1, shape[2]) for shape in (image, weight, output)]
    return flat[0], flat[1], flat[2], (1, *stride), (0, *padding), (1, *dilation), groups


def _numbers(text: str | None, rank: int) -> Sizes | None:
    found = tuple(map(int, _NUMBERS.findall(text or "")))
    return found if len(found) == rank else found * rank if len(found) == 1 else None


def _kernel(layer: Layer, image: Sizes, groups: int, rank: int) -> Sizes | None:
    """A square one whose weights are as many as the layer's, with a bias or without."""
    for weights in (layer.parameters, layer.parameters - layer.output[1]):
        area, rest = divmod(weights * groups, image[1] * layer.output[1])
        side = isqrt(area) if rank == 2 else round(area ** (1 / rank))
        if not rest and area and side**rank == area:
            return (side,) * rank
    return None


@lru_cache(maxsize=4096)
def _asked(
    precision: int,
    item: int,
    channels_last: bool,
    image: Sizes,
    weight: Sizes,
    output: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> Scratch:
    ask = shipped_convolutions().scratch_bytes
    forward = ConvShape(
        FORWARD, precision, item, channels_last, False, False, image, weight, output, stride, padding, dilation, groups
    )
    return (
        ask(forward),
        ask(forward._replace(direction=INPUT_GRAD)),
        ask(forward._replace(direction=WEIGHT_GRAD)),
    )
