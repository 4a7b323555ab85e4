"""Draws transformers: encoders, decoders, both together, and vision transformers."""

from __future__ import annotations

from gpumemnet.dataset.program import Dice, Drawn, Ops, act, branches, dropout, op
from gpumemnet.dataset.ranges import Transformer


class _Style:
    """Settings that all blocks of one model share."""

    def __init__(self, dice: Dice, ranges: Transformer, shape: str) -> None:
        llama = shape == "llama"
        self.head_size = dice.word(ranges.head_sizes)
        least = max(1, ranges.widths[0] // self.head_size)
        self.heads = max(least, min(ranges.widths[1], dice.log(ranges.widths)) // self.head_size)
        self.width = self.heads * self.head_size
        ratio = dice.word(ranges.ratios)
        self.inner = max(8, round(self.width * ratio))
        self.style: str = {"gpt": "conv1d", "llama": "split"}.get(shape, "")
        if not self.style:
            self.style = dice.word(ranges.causal_styles) if shape == "decoder" else dice.word(ranges.styles)
        self.eager = dice.chance(ranges.eager)
        share = dice.word(ranges.kv_shares) if llama else 1
        self.kv = self.heads // share if self.heads % share == 0 else self.heads
        self.pre = llama or shape == "gpt" or dice.chance(ranges.pre_norm)
        self.parallel = shape == "decoder" and dice.chance(ranges.parallel)
        self.gated = llama or dice.chance(ranges.gated)
        self.norm = "rms" if llama or dice.chance(ranges.rms) else "layer"
        self.bias = not llama and dice.chance(ranges.bias)
        self.activation = "silu" if llama else dice.word(ranges.activations)
        p = dice.word(ranges.dropouts)
        self.dropout = p if dice.chance(ranges.dropout) and not llama else 0.0
        self.functional = dice.chance(ranges.functional)

    def normed(self) -> Ops:
        return [op("norm", f=self.norm)]

    def dropped(self) -> Ops:
        return dropout(self.dropout, self.functional)

    def linear(self, out: int) -> dict[str, object]:
        if self.style == "conv1d":
            return op("conv1d", out=out)
        return op("linear", out=out, bias=self.bias)

    def attention(self, causal: bool, cross: bool = False) -> Ops:
        made = op(
            "attention",
            heads=self.heads,
            style=self.style,
            how="eager" if self.eager else "sdpa",
            kv=self.kv if self.kv != self.heads else None,
            causal=causal,
            cross=cross,
            dropout=self.dropout or None,
            module_dropout=bool(self.dropout) and self.eager and not self.functional,
            bias=self.bias or self.style not in ("split", "fused"),
        )
        return [made, *self.dropped()]

    def mlp(self) -> Ops:
        active = act(self.activation, functional=self.functional)
        wide: Ops = [self.linear(self.inner), active]
        if self.gated:
            wide = [branches("mul", wide, [self.linear(self.inner)])]
        return [*wide, self.linear(self.width), *self.dropped()]

    def past(self, body: Ops) -> Ops:
        """A body with a shortcut: the norm comes before the body, or after the sum."""
        if self.pre:
            return [branches("add", [], [*self.normed(), *body])]
        return [branches("add", [], body), *self.normed()]

    def blocks(self, times: int, causal: bool = False, cross: bool = False) -> Ops:
        if self.parallel:
            body = self.past([branches("add", self.attention(causal), self.mlp())])
        else:
            seen = self.past(self.attention(False, cross=True)) if cross else []
            body = [*self.past(self.attention(causal)), *seen, *self.past(self.mlp())]
        return [op("block", body=body, times=times), *(self.normed() if self.pre else [])]


def draw_transformer(dice: Dice, ranges: Transformer, shape: str) -> Drawn:
    style = _Style(dice, ranges, shape)
    times = dice.mixed(ranges.blocks)
    drawn: Drawn = {"checkpointing": dice.chance(ranges.checkpointing)}
    if shape == "vit":
        return drawn | _vit(dice, ranges, style, times)
    length = dice.of(ranges.sequences) if dice.chance(ranges.usual_sequence) else dice.log(ranges.sequence)
    if style.eager and style.style != "torch":
        length = min(length, ranges.eager_sequence)
    usual = dice.chance(ranges.usual_vocabulary)
    vocabulary = dice.of(ranges.vocabularies) if usual else dice.log(ranges.vocabulary)
    tied = dice.chance(ranges.tied)
    drawn |= {"input": (length,), "vocabulary": vocabulary, "outputs": vocabulary, "loss": "tokens"}
    match shape:
        case "seq2seq":
            return drawn | _seq2seq(dice, style, length, vocabulary, times, tied)
        case "encoder":
            return drawn | _encoder(dice, ranges, style, length, vocabulary, times, tied)
    embedded = _embedded(style, vocabulary, 0 if shape == "llama" else length)
    return drawn | {"model": [*embedded, *style.blocks(times, causal=True), _scores(vocabulary, tied)]}


def _embedded(style: _Style, vocabulary: int, length: int, tied: bool = False) -> Ops:
    embedding = op("embed", vocabulary=vocabulary, out=style.width, tied=tied)
    positions = [op("positions", length=length)] if length else []
    return [embedding, *positions, *([] if style.pre else style.normed()), *style.dropped()]


def _scores(vocabulary: int, tied: bool) -> dict[str, object]:
    return op("linear", out=vocabulary, bias=False, tied=tied)


def _encoder(
    dice: Dice, ranges: Transformer, style: _Style, length: int, vocabulary: int, times: int, tied: bool
) -> Drawn:
    model = [*_embedded(style, vocabulary, length), *style.blocks(times)]
    if dice.chance(ranges.masked):
        if dice.chance(ranges.head_transform):
            active = act(style.activation, functional=style.functional)
            model += [op("linear", out=style.width), active, *style.normed()]
        return {"model": [*model, _scores(vocabulary, tied)]}
    outputs = dice.log(ranges.classes)
    model.append(op("first") if dice.chance(0.6) else op("mean"))
    if dice.chance(0.5):
        model += [op("linear", out=style.width), act("tanh")]
    return {"model": [*model, *style.dropped(), op("linear", out=outputs)], "outputs": outputs, "loss": "classes"}


def _seq2seq(dice: Dice, style: _Style, length: int, vocabulary: int, times: int, tied: bool) -> Drawn:
    """The target is at most as long as the source. Both sides share the embedding if the scores do."""
    target = length if dice.chance(0.4) else max(8, dice.log((max(8, length // 8), max(8, length))))
    encoder = [*_embedded(style, vocabulary, length), *style.blocks(max(1, times // 2))]
    decoder = [*_embedded(style, vocabulary, target, tied), *style.blocks(max(1, times // 2), True, True)]
    decoder.append(_scores(vocabulary, tied))
    return {"model": [op("seq2seq", encoder=encoder, decoder=decoder)], "target": target}


def _vit(dice: Dice, ranges: Transformer, style: _Style, times: int) -> Drawn:
    patch, outputs = dice.word(ranges.patches), dice.log(ranges.classes)
    side = max(2, dice.log(ranges.image) // patch)
    if style.eager and style.style != "torch":
        side = min(side, int(ranges.eager_sequence**0.5))
    side = min(side, int(ranges.sequence[1] ** 0.5))
    model: Ops = [op("conv", out=style.width, k=patch, s=patch, p=0), op("tokens"), op("positions", length=side * side)]
    model += [*style.dropped(), *style.blocks(times), op("mean") if dice.chance(0.5) else op("first")]
    model.append(op("linear", out=outputs))
    return {"input": (3, side * patch, side * patch), "outputs": outputs, "model": model}
