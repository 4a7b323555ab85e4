"""Reads `model.summary()` of Keras 3 and 2.

The result is like that of PyTorch's summaries: images and signals with channels first, moving averages of a batch norm
not among its parameters, the optimizer's variables not among the model's. Classes keep Keras' names, except Conv1D,
which is a linear layer in Hugging Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from carma.trial.layers.description import Described, Layer, ReadSummary
from gpumemnet.summaries.keras_table import TableRow, is_box, table_rows
from gpumemnet.summaries.shapes import Shape
from gpumemnet.summaries.text import MOST_LAYERS, bad, counted, has_inner, read_count, too_many
from gpumemnet.summaries.totals import Figures, check_total, input_of, read_figures

_NAME = re.compile(r"(?P<name>[^(]*?)\s*\((?P<kind>\w{1,200})(?P<cut>…?)(?P<closed>\)?)", re.ASCII)
_SHAPES = re.compile(r"\(([^()]*)\)")
_SIZE = re.compile(r"\s*(None|\d{1,12})\s*", re.ASCII)
_CONNECTED = re.compile(r"([^\[,…]*)(.?)", re.DOTALL)
_UNKNOWN = -1  # a size that is None
_MODELS = ("Sequential", "Functional", "Model")
_RESIZE = ("Conv1D", "SeparableConv1D", "DepthwiseConv1D", "MaxPooling1D", "AveragePooling1D", "UpSampling1D",
           "ZeroPadding1D", "Cropping1D", "Conv1DTranspose")  # fmt: skip
_NONE = "sizes that are None leave all outputs unknown"
IN_TORCH = "it is what the same layers take in PyTorch; TensorFlow, by default, takes the whole card at its start"
_OPEN = f"{_NONE}; --input tells the length of a sequence, like --input 128"
_FIX = f"{_NONE}; give the model an input of fixed sizes before summary(): keras.Input(shape=(224, 224, 3))"
# `#` stands for 1, 2 or 3.
_OF_KERAS = """
Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention Average BatchNormalization Bidirectional
CategoryEncoding CenterCrop Concatenate Dense Dot Dropout ELU EinsumDense Embedding Flatten Functional GRU
GaussianDropout GaussianNoise GroupNormalization GroupQueryAttention GroupedQueryAttention Identity InputLayer LSTM
Lambda LayerNormalization LeakyReLU Masking Maximum Minimum MultiHeadAttention Multiply Normalization PReLU
Permute RMSNormalization RNN ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding Sequential SimpleRNN
Softmax SpectralNormalization Subtract ThresholdedReLU TimeDistributed UnitNormalization AdaptiveAveragePooling#D
AdaptiveMaxPooling#D AveragePooling#D Conv#D Conv#DTranspose ConvLSTM#D Cropping#D DepthwiseConv#D
GlobalAveragePooling#D GlobalMaxPooling#D MaxPooling#D SeparableConv#D SpatialDropout#D UpSampling#D ZeroPadding#D
"""
_NAMES = tuple(_OF_KERAS.split())
_CONVOLUTION = re.compile(r"(Depthwise)?Conv([123])D(Transpose)?")
_OF_SIGNALS = re.compile(r"\w*Conv1D\w*|BatchNormalization")
_OF_ROWS = re.compile(r"\w*(Dense|Embedding|Attention|LSTM|GRU|RNN|Bidirectional|TimeDistributed)\w*")


def is_keras(lines: Sequence[str], header: int) -> bool:
    """A box; a head between lines of `_` and of `=`, which only Keras prints; or a first row like Keras'."""
    if is_box(lines[header]):
        return True
    if header and set(lines[header - 1].strip()) == {"_"}:
        return True
    rows = (line for line in lines[header + 1 : header + 4] if line.strip(" =_-"))
    return re.match(r"\s*\S+ \([^)]*\)?\s+\[?\((None|\d+),", next(rows, "")) is not None


def read_keras(lines: Sequence[str], header: int, batch: int | None, sample: Shape) -> ReadSummary:
    rows, end = table_rows(lines, header)
    if not rows:
        raise bad(header, lines[header], "no layers follow the head of the table")
    if len(rows) > MOST_LAYERS:
        raise too_many(header, lines[header])
    found = [_KerasRow(row, lines) for row in rows]
    _check_built(found, lines)
    _complete(found)
    leaves, hidden = _leaves(found)
    figures = read_figures(lines[end : end + 12])
    total = None if figures.total is None else figures.total - figures.optimizer
    remarks = check_total(sum(one.parameters for one in leaves), total, header, lines[header])
    return _read(leaves, _gaps(leaves, hidden, sample), figures, batch, sample, remarks)


class _KerasRow:
    """A parsed row."""

    def __init__(self, row: TableRow, lines: Sequence[str]) -> None:
        text = lines[row.line]
        name = _NAME.match(row.name)
        if name is None:
            raise bad(row.line, text, "not a row of a Keras summary (a name, and the class in brackets)")
        self.row = row
        self.name = name["name"]
        self.kind = name["kind"]
        self.is_cut = bool(name["cut"]) or not name["closed"]
        self.shape = _shape(row, text)
        self.fed: Shape = ()
        self.of_signals = False
        count = read_count(row.parameters.removesuffix("(unbuilt)"))
        if count is None:
            raise bad(row.line, text, f"{row.parameters!r} is not a number of parameters")
        self.parameters = count


def _shape(row: TableRow, text: str) -> Shape:
    """The first of several shapes; empty for `multiple` and `?`."""
    if row.shape in ("multiple", "?", "", "-"):
        return ()
    first = _SHAPES.search(row.shape)
    sizes = [_SIZE.fullmatch(size) for size in first[1].split(",") if size.strip()] if first else [None]
    known = [size[1] for size in sizes if size]
    if len(known) != len(sizes):
        raise bad(row.line, text, f"{row.shape!r} is not the shape of an output")
    return tuple(_UNKNOWN if size == "None" else int(size) for size in known)


def _check_built(found: Sequence[_KerasRow], lines: Sequence[str]) -> None:
    unbuilt = next((one for one in found if one.row.parameters.endswith("(unbuilt)")), None)
    if unbuilt is not None:
        why = (
            "the model is not built, so it has neither shapes nor parameters; call it once on a batch before summary()"
        )
        raise bad(unbuilt.row.line, lines[unbuilt.row.line], why)


def _complete(found: Sequence[_KerasRow]) -> None:
    """Completes inputs, from names or from the row above; names that were cut off; and channels first."""
    above: dict[str, Shape] = {}
    last: Shape = ()
    for one in found:
        one.fed = last if one.row.connected is None else _source(one.row.connected, above)
        if one.is_cut:
            one.kind = _full_name(one.kind, max(len(one.fed), len(one.shape)) - 2)
        above[one.name] = last = one.shape
    signals = _of_signals(one.kind for one in found)
    for one, one.of_signals in zip(found, signals, strict=True):
        one.shape, one.fed = _channels_first(one.shape), _channels_first(one.fed)


def _source(connected: str, above: dict[str, Shape]) -> Shape:
    """The shape of the first connected layer. Names may be cut off in both places."""
    name, mark = _CONNECTED.match(connected.lstrip("['")).groups()  # type: ignore[union-attr]  # it matches anything
    if name in above:
        return above[name]
    if mark != "…" and not any(other.endswith("…") for other in above):
        return ()
    starts = (other for other in reversed(above) if other.startswith(name) or name.startswith(other.removesuffix("…")))
    return next((above[other] for other in starts if name), ())


def _channels_first(shape: Shape) -> Shape:
    """Whether images and volumes have their channels first. Sequences depend on the layers around; in PyTorch, too,
    words have their width last."""
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) in (4, 5) else shape


def _leaves(found: Sequence[_KerasRow]) -> tuple[list[_KerasRow], int]:
    """The rows without models whose layers follow, and the number of nested models whose layers are not shown."""
    inner = has_inner([one.row.depth for one in found])
    leaves = [one for one, has_rows in zip(found, inner, strict=True) if not has_rows]
    return leaves, sum(one.kind in _MODELS for one in leaves)


def _gaps(leaves: Sequence[_KerasRow], hidden: int, sample: Shape) -> tuple[str, ...]:
    found: list[str] = []
    if _length(leaves, sample) is None:  # for any length, so that --input does not help
        found.append(_FIX if _length(leaves, (1,)) is None else _OPEN)
    if hidden:
        stops = f"the summary stops above the layers of {counted(hidden, 'nested model')}"
        found.append(f"{stops}; summary(expand_nested=True) shows them")
    return tuple(found)


def _read(
    leaves: Sequence[_KerasRow],
    gaps: tuple[str, ...],
    figures: Figures,
    batch: int | None,
    sample: Shape,
    remarks: tuple[str, ...],
) -> ReadSummary:
    layers = [one for one in leaves if one.kind != "InputLayer"]
    first = next((one.shape for one in leaves if one.shape), ())
    known = batch or (first[0] if first and first[0] > 0 else None)
    sizes = _Sizes(known or 1, _length(leaves, sample))
    made = tuple(_layer(one, sizes) for one in layers)
    moving = sum(_moving(one) for one in layers)
    others = figures.optimizer + moving
    given = next((one.shape for one in leaves if one.kind == "InputLayer"), ())
    filled = sizes.fill(given)
    entered, notes = input_of(filled, _as_given(sample, filled), known or 1, None)
    described = Described(
        layers=made,
        batch=known,
        parameters=sum(one.parameters for one in made) if figures.total is None else max(figures.total - others, 0),
        input=entered,
        optimizer_slots=figures.optimizer // figures.trained if figures.optimizer and figures.trained else None,
    )
    frozen = max(figures.frozen - moving, 0)
    return ReadSummary(described=described, remarks=(*remarks, *notes, IN_TORCH), gaps=gaps, frozen=frozen)


def _as_given(sample: Shape, given: Shape) -> Shape:
    """`sample` with channels first, if it was given with channels last."""
    turned = (*sample[-1:], *sample[:-1])
    return turned if turned == given[1:] else sample


class _Sizes(NamedTuple):
    """The sizes that a table has as None. Without a length all shapes are unknown."""

    batch: int
    length: int | None

    def fill(self, shape: Shape) -> Shape:
        if self.length is None or not shape:
            return ()
        return (self.batch, *(self.length if size == _UNKNOWN else size for size in shape[1:]))


def _length(leaves: Sequence[_KerasRow], sample: Shape) -> int | None:
    """The length of the sequences that the table has as None: the first size of the input, if no layer changes it. 0 if
    there is no such size; None if it is unknown."""
    unknown = [one for one in leaves if _UNKNOWN in one.shape[1:]]
    if not unknown:
        return 0
    changes = any(one.kind in _RESIZE or one.shape[2:].count(_UNKNOWN) for one in unknown)
    return None if changes or not sample else sample[0]


def _layer(one: _KerasRow, sizes: _Sizes) -> Layer:
    fed, made = sizes.fill(one.fed), sizes.fill(one.shape)
    if one.of_signals:
        fed, made = (shape if len(shape) != 3 else (shape[0], shape[2], shape[1]) for shape in (fed, made))
    return Layer(
        name=one.name,
        kind="Conv1d" if one.kind == "Conv1D" else one.kind,
        output=made,
        parameters=one.parameters - _moving(one),
        inputs=(fed,) if fed else (),
        attributes=_attributes(one.kind, one.parameters, one.fed, one.shape),
    )


def _moving(one: _KerasRow) -> int:
    """Moving averages of a batch norm: half of its weights, which PyTorch does not count as parameters."""
    return one.parameters // 2 if one.kind == "BatchNormalization" else 0


def _full_name(cut: str, places: int) -> str:
    """Full name of a class whose name was cut off; `places`: number of sizes besides batch and channels (2 of an
    image). Unchanged if it is no class of Keras."""
    names = [name.replace("#", str(places)) for name in _NAMES]
    return next((name for name in names if name.startswith(cut)), cut)


def _of_signals(kinds: Iterable[str]) -> Iterator[bool]:
    """Whether three sizes mean a signal with channels, or a sequence: as for the last layer of either kind.
    `carma.trial.layers.column_reading` does the same."""
    signals = False
    for kind in kinds:
        signals = bool(_OF_SIGNALS.fullmatch(kind)) or (signals and not _OF_ROWS.fullmatch(kind))
        yield signals


def _attributes(kind: str, parameters: int, fed: Shape, made: Shape) -> dict[str, str]:
    """Attributes with PyTorch's names, as far as they follow from the parameters and the shapes (channels first)."""
    found = _CONVOLUTION.fullmatch(kind)
    if kind == "Dense" and fed and made:
        return {"in_features": str(fed[-1]), "out_features": str(made[-1])}
    if found is None or not made:
        return {}
    channels = 1 if len(made) in (4, 5) else -1
    given = made[channels]
    if len(fed) != len(made):
        return {"out_channels": str(given)}
    places, taken = int(found[2]), fed[channels]
    known = {"in_channels": str(taken), "out_channels": str(given)}
    if found[1]:
        known["groups"] = str(taken)
    side = _side(parameters, given if found[1] else taken * given, given, places)
    return known if side is None else {**known, "kernel_size": str((side,) * places)}


def _side(parameters: int, each: int, biases: int, places: int) -> int | None:
    """The side of a square kernel, with or without a bias; None if the parameters do not fit."""
    for weights in (parameters - biases, parameters):
        if each > 0 and weights > 0 and weights % each == 0:
            side = round(math.pow(weights // each, 1 / places))
            if math.prod([side] * places) * each == weights:
                return side
    return None
