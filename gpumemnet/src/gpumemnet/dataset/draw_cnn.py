"""Draws convolutional networks, mostly for images, some for signals and volumes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from gpumemnet.dataset.program import Dice, Drawn, Ops, act, branches, dropout, op, probability
from gpumemnet.dataset.ranges import Cnn

# Convolutions in one block of each shape, to reach the wanted number of them.
IN_BLOCK = {"residual": 2, "bottleneck": 3, "grouped": 3, "dense": 2, "inverted": 3, "inception": 6, "convnext": 3}
ENCODER_DECODERS = ("hourglass", "unet")


def draw_cnn(dice: Dice, ranges: Cnn, shape: str) -> Drawn:
    style = _Style(dice, ranges)
    image = _image(dice, ranges)
    if shape == "convnext":
        style.activation, style.norm = dice.word({"gelu": 4, "silu": 1, "relu": 1}), "group"
        style.group_count, style.inplace = dice.of((1, 1, 1, 32)), False
    if shape != "grouped":
        style.groups = 1
    count = dice.mixed(ranges.convolutions)
    head = dice.word(ranges.heads)
    if shape in ENCODER_DECODERS:
        body, multiple = _encoder_decoder(dice, ranges, style, shape, count)
        scale = 1
    else:
        stem, stride = _stem(dice, ranges, style, image)
        stages, halved = _stages(dice, ranges, style, shape, count, math.log2(max(1, min(image[1:]) / stride)))
        body, multiple = [*stem, *stages], stride * 2**halved
        scale = multiple
    if head == "pixels" or shape in ENCODER_DECODERS:
        image = (image[0], *(max(multiple, side - side % multiple) for side in image[1:]))
    outputs = dice.log(ranges.pixel_classes if head == "pixels" else ranges.classes)
    return {
        "input": image,
        "outputs": outputs,
        "loss": "pixels" if head == "pixels" else "classes",
        "model": [*body, *_head(dice, ranges, style, head, outputs, scale)],
        "checkpointing": dice.chance(ranges.checkpointing),
        "channels_last": len(image) == 3 and dice.chance(ranges.channels_last),
    }


def _image(dice: Dice, ranges: Cnn) -> tuple[int, ...]:
    kind = dice.uniform((0, 1))
    if kind < ranges.signal:
        return (dice.log(ranges.signal_channels), dice.log(ranges.signal_length))
    channels = dice.word(ranges.channels)
    if kind < ranges.signal + ranges.volume:
        side = dice.log(ranges.volume_side)
        return (channels, side, side, dice.log(ranges.volume_side) if dice.chance(ranges.oblong) else side)
    sides = [dice.of(ranges.images) if dice.chance(ranges.usual_image) else dice.log(ranges.image) for _ in "hw"]
    return (channels, *sides) if dice.chance(ranges.oblong) else (channels, sides[0], sides[0])


def _stem(dice: Dice, ranges: Cnn, style: _Style, image: tuple[int, ...]) -> tuple[Ops, int]:
    """The stem, and the factor by which it shrinks the image. Small images keep their size."""
    width, k, s = dice.log(ranges.widths), dice.word(ranges.stem_kernels), dice.word(ranges.stem_strides)
    pool = dice.chance(ranges.stem_pool)
    if min(image[1:]) < 48:
        k, s, pool = min(k, 5), 1, False
    made = style.unit(width, k, s)
    if pool:
        made.append(op("pool", f="max", k=3, s=2, p=1))
    return made, s * (2 if pool else 1)


def _stages(dice: Dice, ranges: Cnn, style: _Style, shape: str, count: int, halvings: float) -> tuple[Ops, int]:
    """The stages, and the number of times that they halve the image."""
    stages = max(1, min(dice.whole(ranges.stages), int(halvings)))
    blocks = max(1, round((count - 1) / IN_BLOCK.get(shape, 1))) if count > 1 else 0
    first = dice.log(ranges.widths)
    widths = _widths(dice, shape, stages, first, ranges.width_cap)
    if shape == "bottleneck":
        widths = [min(ranges.width_cap, width * 4) for width in widths]
    if shape == "grouped":
        widths = [max(2 * style.groups, width - width % style.groups) for width in widths]
    growth = dice.log(ranges.growths)
    made: Ops = []
    used = widths[:blocks]  # of stages with at least one block
    for number, (width, out) in enumerate(itertools.pairwise([0, *used])):
        times = blocks // stages + (1 if number < blocks % stages else 0)
        made += _stage(style, shape, (width, out), number > 0, times, growth)
    return made, max(0, len(used) - 1)


def _stage(style: _Style, shape: str, widths: tuple[int, int], shrinks: bool, times: int, growth: int) -> Ops:
    width, out = widths
    s = 2 if shrinks else 1
    match shape:
        case "residual" | "bottleneck" | "grouped" | "inverted":
            block = {"residual": _residual, "inverted": _inverted}.get(shape, _bottleneck)
            first, later = block(style, width, out, s), block(style, out, out, 1)
            lead = [op("block", body=first)] if width else [*style.unit(out, 3), op("block", body=later)]
            return lead + _repeated(later, times - 1)
        case "dense":
            lead = [*style.unit(out, 1), op("pool", f="avg", k=2)] if shrinks else []
            return lead + _repeated(_dense(style, growth), times)
        case "inception":
            return (_halved(style, out) if shrinks else []) + _repeated(_inception(style, out), times)
        case "convnext":
            lead = [*style.norm_layers(), op("conv", out=out, k=2, s=2, p=0)] if shrinks else [style.conv(out, 1)]
            return lead + _repeated(_convnext(style, out), times)
    unit = style.unit(out, style.kernel)
    if shrinks and style.shrink == "stride":
        return style.unit(out, max(3, style.kernel), 2) + _repeated(unit, times - 1)
    return (_halved(style, out) if shrinks else []) + _repeated(unit, times)


def _repeated(body: Ops, times: int) -> Ops:
    return [op("block", body=body, times=times)] if times > 0 else []


def _widths(dice: Dice, shape: str, stages: int, width: int, cap: int) -> list[int]:
    """The width of each stage. Most double, as in nearly all published networks."""
    match shape:
        case "uniform":
            made = [float(width)] * stages
        case "gradual":
            step = width * dice.uniform((0.25, 1.0))
            made = [width + step * number for number in range(stages)]
        case "inverted" | "inception":
            factor = dice.uniform((1.3, 2.0))
            made = [width * factor**number for number in range(stages)]
        case "pyramid" if dice.chance(0.3):
            made = [width * 2.0 ** (stages - number - 1) for number in range(stages)]  # widest first
        case _:
            made = [width * 2.0**number for number in range(stages)]
    return [min(cap, max(8, round(each))) for each in made]


def _encoder_decoder(dice: Dice, ranges: Cnn, style: _Style, shape: str, count: int) -> tuple[Ops, int]:
    """An encoder that halves the image at each level, and a decoder that doubles it again. In a U-Net each level of
    the decoder also gets the output of the encoder's level. Returns the layers, and the factor that divides the sides
    of the image."""
    levels = dice.whole((1, ranges.stages[1] - 1))
    each = max(1, min(6, round(count / (2 * levels + 1))))
    width = dice.log((ranges.widths[0], ranges.widths[1] // 2))
    learned = dice.chance(0.5)
    cap = ranges.width_cap

    def level(number: int) -> Ops:
        out = min(cap, width * 2**number)
        units = [op("block", body=style.unit(out, 3), times=each)]
        if number == levels:
            return units
        below = [*_halved(style, out), *level(number + 1), *_doubled(style, out, learned)]
        skip = [branches("cat", [], below)] if shape == "unet" else below
        return [*units, *skip, op("block", body=style.unit(out, 3), times=each)]

    return level(0), 2**levels


def _head(dice: Dice, ranges: Cnn, style: _Style, head: str, outputs: int, scale: int) -> Ops:
    match head:
        case "pixels":
            up = [op("upsample", scale=scale)] if scale > 1 else []
            return [*dropout(style.dropout), op("conv", out=outputs, k=1), *up]
        case "convolution":
            return [*dropout(style.dropout), op("conv", out=outputs, k=1), op("pool", f="avg", k=0), op("flatten")]
        case "flatten":
            width = dice.log(ranges.flat_widths)
            made = [op("flatten")]
            for _ in range(dice.whole((0, 2))):
                made += [op("linear", out=width), act(style.activation, style.inplace), *dropout(style.dropout)]
            return [*made, op("linear", out=outputs)]
    return [op("pool", f="avg", k=0), op("flatten"), *dropout(style.dropout), op("linear", out=outputs)]


class _Style:
    """Settings that all parts of one model share."""

    def __init__(self, dice: Dice, ranges: Cnn) -> None:
        self.norm = dice.word(ranges.norms)
        self.group_count = dice.word(ranges.group_counts)
        self.activation = dice.word(ranges.activations)
        self.inplace = dice.chance(ranges.inplace)
        self.functional = dice.chance(ranges.functional)
        self.kernel = dice.word(ranges.kernels)
        self.shrink = dice.word(ranges.shrinks)
        self.bias = self.norm == "none" or dice.chance(ranges.conv_bias)
        self.excite = dice.chance(ranges.excite)
        self.expansion = dice.word(ranges.expansions)
        self.groups = dice.word(ranges.groups)
        self.dropout = probability(dice, ranges.dropout, ranges.dropouts)
        self.rows = dice.chance(ranges.rows)

    def conv(self, out: int, k: int, s: int = 1, groups: int = 1) -> dict[str, Any]:
        return op("conv", out=out, k=k, s=s if s > 1 else None, groups=groups if groups > 1 else None, bias=self.bias)

    def norm_layers(self) -> Ops:
        groups = self.group_count if self.norm == "group" else None
        return [op("norm", f=self.norm, groups=groups)] if self.norm != "none" else []

    def activations(self, fresh: bool = True) -> Ops:
        """`fresh`: no other layer needs the input, so the activation may overwrite it."""
        return [act(self.activation, self.inplace and fresh, self.functional)]

    def unit(self, out: int, k: int, s: int = 1, groups: int = 1) -> Ops:
        return [*self.linear_unit(out, k, s, groups), *self.activations()]

    def linear_unit(self, out: int, k: int, s: int = 1, groups: int = 1) -> Ops:
        return [self.conv(out, k, s, groups), *self.norm_layers()]

    def shortcut(self, width: int, out: int, s: int) -> Ops:
        """The shortcut of a residual block: empty, or a 1x1 convolution that matches channels and stride."""
        return [] if width == out and s == 1 else self.linear_unit(out, 1, s)

    def excitation(self, width: int) -> Ops:
        """A squeeze-and-excitation gate, if the style has one: it scales each channel by a learned factor."""
        if not self.excite:
            return []
        narrow = max(4, width // 16)
        gate = [op("pool", f="avg", k=0), op("conv", out=narrow, k=1), act(self.activation, self.inplace)]
        return [branches("mul", [], [*gate, op("conv", out=width, k=1), act("sigmoid")])]


def _residual(style: _Style, width: int, out: int, s: int) -> Ops:
    body = [*style.unit(out, style.kernel, s), *style.linear_unit(out, style.kernel), *style.excitation(out)]
    return [branches("add", body, style.shortcut(width, out, s)), *style.activations()]


def _bottleneck(style: _Style, width: int, out: int, s: int) -> Ops:
    groups = style.groups
    inner = max(4, out // (2 if groups > 1 else 4))
    inner += -inner % groups
    k = max(3, style.kernel)
    body = [
        *style.unit(inner, 1),
        *style.unit(inner, k, s, groups),
        *style.linear_unit(out, 1),
        *style.excitation(out),
    ]
    return [branches("add", body, style.shortcut(width, out, s)), *style.activations()]


def _inverted(style: _Style, width: int, out: int, s: int) -> Ops:
    inner = width * style.expansion
    body = style.unit(inner, 1) if style.expansion > 1 else []
    body += [
        *style.unit(inner, max(3, style.kernel), s, inner),
        *style.excitation(inner),
        *style.linear_unit(out, 1),
    ]
    return [branches("add", [], body)] if width == out and s == 1 else body


def _dense(style: _Style, growth: int) -> Ops:
    body = [*style.norm_layers(), *style.activations(fresh=style.norm != "none"), style.conv(4 * growth, 1)]
    return [branches("cat", [], [*body, *style.norm_layers(), *style.activations(), style.conv(growth, 3)])]


def _inception(style: _Style, out: int) -> Ops:
    quarter = max(4, out // 4)
    half = max(4, quarter // 2)
    return [
        branches(
            "cat",
            style.unit(quarter, 1),
            [*style.unit(half, 1), *style.unit(quarter, 3)],
            [*style.unit(half, 1), *style.unit(quarter, 5)],
            [op("pool", f="max", k=3, s=1, p=1), *style.unit(quarter, 1)],
        )
    ]


def _convnext(style: _Style, width: int) -> Ops:
    """A depthwise convolution, a norm, and two 1x1 convolutions with the activation between them. With `rows` the 1x1
    convolutions are linear layers on channels-last data."""
    many = width * max(2, style.expansion)
    if style.rows:
        layers = [op("norm", f="layer"), op("linear", out=many), *style.activations(), op("linear", out=width)]
        return [branches("add", [], [op("conv", k=7, groups=0), op("rows"), *layers, op("image")])]
    wide = op("conv", out=many, k=1)
    inner = [
        op("conv", k=7, groups=0),
        *style.norm_layers(),
        wide,
        *style.activations(),
        op("conv", out=width, k=1),
    ]
    return [branches("add", [], inner)]


def _halved(style: _Style, width: int) -> Ops:
    """A layer that halves the image."""
    if style.shrink == "stride":
        return style.unit(width, 3, 2)
    return [op("pool", f=style.shrink, k=2)]


def _doubled(style: _Style, width: int, learned: bool) -> Ops:
    """A transposed convolution (`learned`) or an upsampling that doubles the image."""
    if learned:
        return [op("deconv", out=width, k=2, s=2)]
    return [op("upsample", scale=2), *style.unit(width, 3)]
