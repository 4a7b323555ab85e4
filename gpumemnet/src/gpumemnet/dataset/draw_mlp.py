"""Draws multi-layer perceptrons."""

from __future__ import annotations

from gpumemnet.dataset.program import Dice, Drawn, Ops, act, branches, dropout, op, probability
from gpumemnet.dataset.ranges import Mlp

LEAST = 8  # width of the narrowest layer


class _Style:
    """Settings that all layers of one model share."""

    def __init__(self, dice: Dice, ranges: Mlp) -> None:
        self.norm = dice.word(ranges.norms)
        self.activation = dice.word(ranges.activations)
        self.inplace = dice.chance(ranges.inplace)
        self.functional = dice.chance(ranges.functional)
        self.dropout = probability(dice, ranges.dropout, ranges.dropouts)
        self.bias = dice.chance(ranges.bias)

    def layer(self, width: int) -> Ops:
        norm = [op("norm", f=self.norm)] if self.norm != "none" else []
        active = act(self.activation, self.inplace, self.functional)
        return [self.linear(width), *norm, active, *dropout(self.dropout)]

    def linear(self, width: int) -> dict[str, object]:
        return op("linear", out=width, bias=self.bias)


def draw_mlp(dice: Dice, ranges: Mlp, shape: str) -> Drawn:
    layers = dice.whole(ranges.deep_layers if dice.chance(ranges.deep) else ranges.layers)
    width, inputs = dice.log(ranges.widths), dice.log(ranges.inputs)
    values = dice.chance(ranges.values)
    outputs = dice.log(ranges.values_outputs if values else (max(2, ranges.outputs[0]), ranges.outputs[1]))
    style = _Style(dice, ranges)
    match shape:
        case "residual":
            hidden = _residual(dice, style, layers - 1, width)
        case "dense":
            hidden = _dense(style, layers - 1, width, ranges.widths[1])
        case _:
            widths = widths_of(dice, shape, layers - 1, width, ranges.widths[1])
            hidden = [each for one in widths for each in style.layer(one)]
    model = [*hidden, style.linear(outputs)]
    return {"input": (inputs,), "outputs": outputs, "loss": "values" if values else "classes", "model": model}


def widths_of(dice: Dice, shape: str, count: int, width: int, most: int) -> list[int]:
    """`width` is the widest, except for `gradual`, which changes from one width to another."""
    middle = max(1, (count - 1) / 2)
    match shape:
        case "uniform":
            made = [float(width)] * count
        case "pyramid":
            factor = dice.uniform((0.5, 0.8))
            made = [width * factor**number for number in range(count)]
        case "bottleneck":
            narrow = width / dice.of((4, 8, 16))
            made = [narrow if number == count // 2 else float(width) for number in range(count)]
        case "hourglass":
            factor = dice.uniform((0.4, 0.8))
            made = [width * factor ** (middle - abs(number - middle)) for number in range(count)]
        case _:
            end = dice.log((LEAST, most))
            made = [width + (end - width) * number / max(1, count - 1) for number in range(count)]
    return [min(most, max(LEAST, round(each))) for each in made]


def _residual(dice: Dice, style: _Style, count: int, width: int) -> Ops:
    """A first layer, then pairs with a shortcut."""
    if not count:
        return []
    made = style.layer(width)
    pairs, odd = divmod(count - 1, 2)
    inner = dice.of((width, width, max(LEAST, width // 4), min(16_384, width * 2)))
    body = [*style.layer(inner), style.linear(width)]
    if pairs:
        active = act(style.activation, False, style.functional)
        made.append(op("block", body=[branches("add", [], body), active], times=pairs))
    return made + (style.layer(width) if odd else [])


def _dense(style: _Style, count: int, width: int, most: int) -> Ops:
    """Each layer takes the outputs of all layers before it."""
    growth = max(LEAST, min(width, most // max(1, count)))
    return [op("block", body=[branches("cat", [], style.layer(growth))], times=count)] if count else []
