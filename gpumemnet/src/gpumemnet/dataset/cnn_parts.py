"""Parts of convolutional networks: units, blocks, heads."""

from __future__ import annotations

from typing import Any

from gpumemnet.dataset.program import Dice, Ops, act, branches, op, probability
from gpumemnet.dataset.ranges import Cnn


class Style:
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
        made = op("conv", out=out, k=k)
        if s != 1:
            made["s"] = s
        if groups != 1:
            made["groups"] = groups
        if not self.bias:
            made["bias"] = False
        return made

    def normed(self) -> Ops:
        match self.norm:
            case "none":
                return []
            case "group":
                return [op("norm", f="group", groups=self.group_count)]
        return [op("norm", f=self.norm)]

    def acted(self, fresh: bool = True) -> Ops:
        """`fresh`: no other layer needs the input, so it may be overwritten."""
        return [act(self.activation, self.inplace and fresh, self.functional)]

    def unit(self, out: int, k: int, s: int = 1, groups: int = 1) -> Ops:
        return [self.conv(out, k, s, groups), *self.normed(), *self.acted()]

    def linear_unit(self, out: int, k: int, s: int = 1, groups: int = 1) -> Ops:
        return [self.conv(out, k, s, groups), *self.normed()]

    def past(self, width: int, out: int, s: int) -> Ops:
        """The shortcut of a residual block: nothing, or layers that make the sizes equal."""
        return [] if width == out and s == 1 else self.linear_unit(out, 1, s)

    def excited(self, width: int) -> Ops:
        if not self.excite:
            return []
        narrow = max(4, width // 16)
        gate = [op("pool", f="avg", k=0), op("conv", out=narrow, k=1), act(self.activation, self.inplace)]
        return [branches("mul", [], [*gate, op("conv", out=width, k=1), act("sigmoid")])]


def residual(style: Style, width: int, out: int, s: int) -> Ops:
    body = [*style.unit(out, style.kernel, s), *style.linear_unit(out, style.kernel), *style.excited(out)]
    return [branches("add", body, style.past(width, out, s)), *style.acted()]


def bottleneck(style: Style, width: int, out: int, s: int, groups: int = 1) -> Ops:
    inner = max(4, out // (2 if groups > 1 else 4))
    inner += -inner % groups
    k = max(3, style.kernel)
    body = [*style.unit(inner, 1), *style.unit(inner, k, s, groups), *style.linear_unit(out, 1), *style.excited(out)]
    return [branches("add", body, style.past(width, out, s)), *style.acted()]


def inverted(style: Style, width: int, out: int, s: int) -> Ops:
    inner = width * style.expansion
    body = style.unit(inner, 1) if style.expansion > 1 else []
    body += [*style.unit(inner, max(3, style.kernel), s, inner), *style.excited(inner), *style.linear_unit(out, 1)]
    return [branches("add", [], body)] if width == out and s == 1 else body


def dense(style: Style, growth: int) -> Ops:
    body = [*style.normed(), *style.acted(fresh=style.norm != "none"), style.conv(4 * growth, 1)]
    return [branches("cat", [], [*body, *style.normed(), *style.acted(), style.conv(growth, 3)])]


def inception(style: Style, out: int) -> Ops:
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


def convnext(style: Style, width: int) -> Ops:
    """The activation stands between the wide convolutions, the norm after the depthwise one. With channels last the
    wide convolutions are linear layers."""
    many = width * max(2, style.expansion)
    if style.rows:
        layers = [op("norm", f="layer"), op("linear", out=many), *style.acted(), op("linear", out=width)]
        return [branches("add", [], [op("conv", k=7, groups=0), op("rows"), *layers, op("image")])]
    wide = op("conv", out=many, k=1)
    inner = [op("conv", k=7, groups=0), *style.normed(), wide, *style.acted(), op("conv", out=width, k=1)]
    return [branches("add", [], inner)]


def halved(style: Style, width: int) -> Ops:
    """A layer that halves the image."""
    if style.shrink == "stride":
        return style.unit(width, 3, 2)
    return [op("pool", f=style.shrink, k=2)]


def doubled(style: Style, width: int, learned: bool) -> Ops:
    if learned:
        return [op("deconv", out=width, k=2, s=2)]
    return [op("upsample", scale=2), *style.unit(width, 3)]
