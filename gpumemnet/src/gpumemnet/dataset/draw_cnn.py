"""Draws convolutional networks, mostly for images, some for signals and volumes."""

from __future__ import annotations

import math

from gpumemnet.dataset import cnn_parts as parts
from gpumemnet.dataset.cnn_parts import Style
from gpumemnet.dataset.program import Dice, Drawn, Ops, act, branches, dropout, op
from gpumemnet.dataset.ranges import Cnn

# Convolutions in one block of each shape, to reach the wanted number of them.
IN_BLOCK = {"residual": 2, "bottleneck": 3, "grouped": 3, "dense": 2, "inverted": 3, "inception": 6, "convnext": 3}
BODIES = ("hourglass", "unet")


def draw_cnn(dice: Dice, ranges: Cnn, shape: str) -> Drawn:
    style = Style(dice, ranges)
    image = _image(dice, ranges)
    if shape == "convnext":
        style.activation, style.norm = dice.word({"gelu": 4, "silu": 1, "relu": 1}), "group"
        style.group_count, style.inplace = dice.of((1, 1, 1, 32)), False
    count = dice.mixed(ranges.convolutions)
    head = dice.word(ranges.heads)
    if shape in BODIES:
        body, multiple = _there_and_back(dice, ranges, style, shape, count)
        scale = 1
    else:
        stem, stride = _stem(dice, ranges, style, image)
        stages, halved = _stages(dice, ranges, style, shape, count, math.log2(max(1, min(image[1:]) / stride)))
        body, multiple = [*stem, *stages], stride * 2**halved
        scale = multiple
    if head == "pixels" or shape in BODIES:
        image = (image[0], *(max(multiple, side - side % multiple) for side in image[1:]))
    outputs = dice.log(ranges.pixel_classes if head == "pixels" else ranges.classes)
    return Drawn(
        shape=shape,
        input=image,
        outputs=outputs,
        loss="pixels" if head == "pixels" else "classes",
        model=[*body, *_head(dice, ranges, style, head, outputs, scale)],
        checkpointing=dice.chance(ranges.checkpointing),
        channels_last=len(image) == 3 and dice.chance(ranges.channels_last),
    )


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


def _stem(dice: Dice, ranges: Cnn, style: Style, image: tuple[int, ...]) -> tuple[Ops, int]:
    """The stem, and the factor by which it shrinks the image. Small images keep their size."""
    width, k, s = dice.log(ranges.widths), dice.word(ranges.stem_kernels), dice.word(ranges.stem_strides)
    pool = dice.chance(ranges.stem_pool)
    if min(image[1:]) < 48:
        k, s, pool = min(k, 5), 1, False
    made = style.unit(width, k, s)
    if pool:
        made.append(op("pool", f="max", k=3, s=2, p=1))
    return made, s * (2 if pool else 1)


def _stages(dice: Dice, ranges: Cnn, style: Style, shape: str, count: int, halvings: float) -> tuple[Ops, int]:
    """The stages, and how often they halve the image."""
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
    halved, width = 0, 0
    for number, out in enumerate(widths):
        times = blocks // stages + (1 if number < blocks % stages else 0)
        if not times:
            continue
        shrinks = number > 0
        made += _stage(style, shape, (width, out), shrinks, times, growth)
        halved, width = halved + shrinks, out
    return made, halved


def _stage(style: Style, shape: str, widths: tuple[int, int], shrinks: bool, times: int, growth: int) -> Ops:
    width, out = widths
    s = 2 if shrinks else 1
    match shape:
        case "residual" | "bottleneck" | "grouped" | "inverted":
            first, later = (_block(style, shape, one, out, stride) for one, stride in ((width, s), (out, 1)))
            lead = [op("block", body=first)] if width else [*style.unit(out, 3), op("block", body=later)]
            return lead + _repeated(later, times - 1)
        case "dense":
            lead = [*style.unit(out, 1), op("pool", f="avg", k=2)] if shrinks else []
            return lead + _repeated(parts.dense(style, growth), times)
        case "inception":
            return (parts.halved(style, out) if shrinks else []) + _repeated(parts.inception(style, out), times)
        case "convnext":
            lead = [*style.normed(), op("conv", out=out, k=2, s=2, p=0)] if shrinks else [style.conv(out, 1)]
            return lead + _repeated(parts.convnext(style, out), times)
    unit = style.unit(out, style.kernel)
    if shrinks and style.shrink == "stride":
        return style.unit(out, max(3, style.kernel), 2) + _repeated(unit, times - 1)
    return (parts.halved(style, out) if shrinks else []) + _repeated(unit, times)


def _block(style: Style, shape: str, width: int, out: int, s: int) -> Ops:
    match shape:
        case "residual":
            return parts.residual(style, width, out, s)
        case "inverted":
            return parts.inverted(style, max(1, width), out, s)
    return parts.bottleneck(style, width, out, s, style.groups if shape == "grouped" else 1)


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


def _there_and_back(dice: Dice, ranges: Cnn, style: Style, shape: str, count: int) -> tuple[Ops, int]:
    """Down to a small image and up again; in a U-Net the way up also gets the outputs of the way down."""
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
        below = [*parts.halved(style, out), *level(number + 1), *parts.doubled(style, out, learned)]
        meet = [branches("cat", [], below)] if shape == "unet" else below
        return [*units, *meet, op("block", body=style.unit(out, 3), times=each)]

    return level(0), 2**levels


def _head(dice: Dice, ranges: Cnn, style: Style, head: str, outputs: int, scale: int) -> Ops:
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
