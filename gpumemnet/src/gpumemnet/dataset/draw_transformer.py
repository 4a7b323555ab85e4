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
        self.style = _style_of_attention(dice, ranges, shape)
        self.eager = dice.chance(ranges.eager)
        self.kv = self._kv(dice.word(ranges.kv_shares)) if llama else self.heads
        self.pre = llama or shape == "gpt" or dice.chance(ranges.pre_norm)
        self.parallel = shape == "decoder" and dice.chance(ranges.parallel)
        self.gated = llama or dice.chance(ranges.gated)
        self.norm = "rms" if llama or dice.chance(ranges.rms) else "layer"
        self.bias = not llama and dice.chance(ranges.bias)
        self.activation = "silu" if llama else dice.word(ranges.activations)
        p = dice.word(ranges.dropouts)
        self.dropout = p if dice.chance(ranges.dropout) and not llama else 0.0
        self.functional = dice.chance(ranges.functional)

    def _kv(self, share: int) -> int:
        return max(1, self.heads // share) if self.heads % share == 0 else self.heads

    def normed(self) -> Ops:
        return [op("norm", f=self.norm)]

    def dropped(self) -> Ops:
        return dropout(self.dropout, self.functional)

    def linear(self, out: int) -> dict[str, object]:
        if self.style == "conv1d":
            return op("conv1d", out=out)
        return op("linear", out=out) if self.bias else op("linear", out=out, bias=False)

    def attention(self, causal: bool, cross: bool = False) -> Ops:
        made = op("attention", heads=self.heads, style=self.style, how="eager" if self.eager else "sdpa")
        if self.kv != self.heads:
            made["kv"] = self.kv
        if causal:
            made["causal"] = True
        if cross:
            made["cross"] = True
        if self.dropout:
            made["dropout"] = self.dropout
            if self.eager and not self.functional:
                made["module_dropout"] = True
        if not self.bias and self.style in ("split", "fused"):
            made["bias"] = False
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


def _style_of_attention(dice: Dice, ranges: Transformer, shape: str) -> str:
    match shape:
        case "gpt":
            return "conv1d"
        case "llama":
            return "split"
        case "decoder":
            return dice.word(ranges.causal_styles)
    return dice.word(ranges.styles)


def draw_transformer(dice: Dice, ranges: Transformer, shape: str) -> Drawn:
    style = _Style(dice, ranges, shape)
    times = dice.mixed(ranges.blocks)
    checkpointing = dice.chance(ranges.checkpointing)
    if shape == "vit":
        return _vit(dice, ranges, style, times, checkpointing)
    length = dice.of(ranges.sequences) if dice.chance(ranges.usual_sequence) else dice.log(ranges.sequence)
    if style.eager and style.style != "torch":
        length = min(length, ranges.eager_sequence)
    usual = dice.chance(ranges.usual_vocabulary)
    vocabulary = dice.of(ranges.vocabularies) if usual else dice.log(ranges.vocabulary)
    tied = dice.chance(ranges.tied)
    drawn = Drawn(
        shape=shape, input=(length,), vocabulary=vocabulary, outputs=vocabulary, loss="tokens", model=[],
        checkpointing=checkpointing,
    )  # fmt: skip
    match shape:
        case "seq2seq":
            _seq2seq(dice, style, drawn, times, tied)
        case "encoder":
            _encoder(dice, ranges, style, drawn, times, tied)
        case _:
            model = [
                *_embedded(style, vocabulary, 0 if shape == "llama" else length),
                *style.blocks(times, causal=True),
            ]
            drawn.model = [*model, _scores(vocabulary, tied)]
    return drawn


def _embedded(style: _Style, vocabulary: int, length: int, tied: bool = False) -> Ops:
    made = [op("embed", vocabulary=vocabulary, out=style.width)]
    if tied:
        made[0]["tied"] = True
    if length:
        made.append(op("positions", length=length))
    return [*made, *([] if style.pre else style.normed()), *style.dropped()]


def _scores(vocabulary: int, tied: bool) -> dict[str, object]:
    return op("linear", out=vocabulary, bias=False, **({"tied": True} if tied else {}))


def _encoder(dice: Dice, ranges: Transformer, style: _Style, drawn: Drawn, times: int, tied: bool) -> None:
    model = [*_embedded(style, drawn.vocabulary, drawn.input[0]), *style.blocks(times)]
    if dice.chance(ranges.masked):
        if dice.chance(ranges.head_transform):
            model += [
                op("linear", out=style.width),
                act(style.activation, functional=style.functional),
                *style.normed(),
            ]
        drawn.model = [*model, _scores(drawn.vocabulary, tied)]
        return
    drawn.outputs, drawn.loss = dice.log(ranges.classes), "classes"
    model.append(op("first") if dice.chance(0.6) else op("mean"))
    if dice.chance(0.5):
        model += [op("linear", out=style.width), act("tanh")]
    drawn.model = [*model, *style.dropped(), op("linear", out=drawn.outputs)]


def _seq2seq(dice: Dice, style: _Style, drawn: Drawn, times: int, tied: bool) -> None:
    """The target is at most as long as the source. Both sides share the embedding if the scores do."""
    length, vocabulary = drawn.input[0], drawn.vocabulary
    drawn.target = length if dice.chance(0.4) else max(8, dice.log((max(8, length // 8), max(8, length))))
    encoder = [*_embedded(style, vocabulary, length), *style.blocks(max(1, times // 2))]
    decoder = [*_embedded(style, vocabulary, drawn.target, tied), *style.blocks(max(1, times // 2), True, True)]
    drawn.model = [op("seq2seq", encoder=encoder, decoder=[*decoder, _scores(vocabulary, tied)])]


def _vit(dice: Dice, ranges: Transformer, style: _Style, times: int, checkpointing: bool) -> Drawn:
    patch, outputs = dice.word(ranges.patches), dice.log(ranges.classes)
    side = max(2, dice.log(ranges.image) // patch)
    if style.eager and style.style != "torch":
        side = min(side, int(ranges.eager_sequence**0.5))
    side = min(side, int(ranges.sequence[1] ** 0.5))
    model: Ops = [op("conv", out=style.width, k=patch, s=patch, p=0), op("tokens"), op("positions", length=side * side)]
    model += [*style.dropped(), *style.blocks(times), op("mean") if dice.chance(0.5) else op("first")]
    return Drawn(
        shape="vit",
        input=(3, side * patch, side * patch),
        outputs=outputs,
        model=[*model, op("linear", out=outputs)],
        checkpointing=checkpointing,
    )
