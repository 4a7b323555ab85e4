"""From a model's description to its columns, and what all arithmetic over layers needs of them (`read_layers`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from carma.trial.layers.columns import Columns, flags, inputs_of, shifted
from carma.trial.layers.description import HALF, Described, Layer
from carma.trial.layers.functions import Unseen, find_unseen
from carma.trial.layers.kinds import FUNCTIONS, INDEX, PRODUCTS, TORCH_ATTENTION, function_of, kind_of
from carma.trial.layers.operators import layers_of

# Autocast computes products in half precision. _FOLLOWS keep the precision of their input; all others use 32 bits.
CAST = flags(*PRODUCTS)
_FOLLOWS = flags(
    "activation", "rectifier", "dropout", "pooling", "max_pooling", "batch_norm", "shape", "merge", "upsampling"
)


class CannotTell(Exception):
    """Why there are no features of this description, as a sentence."""


@dataclass(frozen=True)
class LayerReading:
    """A description, whose layers are modules only, with its columns."""

    described: Described
    columns: Columns
    before: NDArray[np.bool_]  # whether a layer takes the output of the layer before it
    each: NDArray[np.float64]  # bytes of an element of a layer's output
    unseen: Unseen
    heads: float  # of attention
    length: float  # of the sequence


def read_layers(described: Described) -> LayerReading:
    """Raises CannotTell if the batch or all outputs are unknown, or a layer is recurrent."""
    if not described.batch:
        raise CannotTell("the batch size is not known; with --summary, --batch sets it")
    if not any(layer.output for layer in described.layers):
        raise CannotTell(
            "the summary does not contain the shapes of the layers' outputs; "
            "a torchinfo or torchsummary table does, or --input with print(model)"
        )
    described = layers_of(described)
    columns = columns_of(described)
    previous = shifted(columns.outputs, 0.0)
    before: NDArray[np.bool_] = np.abs(columns.inputs - previous) <= 0.02 * previous
    unseen = find_unseen(columns, before, described.batch or 1)
    each = _element_bytes(described, columns)
    return LayerReading(described, columns, before, each, unseen, *_attention(described, columns, unseen))


def columns_of(described: Described) -> Columns:
    layers, count = described.layers, len(described.layers)

    def column(values: Iterator[float]) -> NDArray[np.float64]:
        return np.fromiter(values, np.float64, count)

    kinds = np.array([_kind(layer) for layer in layers])
    outputs = column(math.prod(layer.output) if layer.output else 0 for layer in layers)
    given = column(math.prod(layer.inputs[0]) if layer.inputs else 0 for layer in layers)
    made = Columns(
        kinds=kinds,
        outputs=outputs,
        parameters=column(_parameters(layer) for layer in layers),
        channels=column(_channels(layers, kinds.tolist())),
        inplace=np.fromiter((layer.inplace for layer in layers), np.bool_, count),
        inputs=given,
        names=np.array([layer.kind for layer in layers]),
    )
    if given.all():  # as in a trial run
        return made
    first = float(math.prod(described.input)) if described.input else outputs[0]
    dimensions = np.fromiter((len(layer.output) - 2 for layer in layers), np.int64, count)
    return Columns(**{**vars(made), "inputs": np.where(given > 0, given, inputs_of(made, dimensions, first))})


def _parameters(layer: Layer) -> int:
    """Some lists omit the weights of torch's attention that turn its sum into its output."""
    width = layer.output[-1] if layer.output else 0
    if layer.kind == TORCH_ATTENTION and layer.parameters in (3 * width * width, 3 * width * (width + 1)):
        return layer.parameters // 3 * 4
    return layer.parameters


def _kind(layer: Layer) -> int:
    attributes = layer.attributes
    is_linear = not attributes or "nf" in attributes or "nx" in attributes
    is_grouped, drops = attributes.get("groups", "1") != "1", attributes.get("p") not in _NOTHING
    return _kind_index(layer.kind, layer.inplace, is_linear, is_grouped, drops)


@lru_cache(maxsize=4096)
def _kind_index(name: str, inplace: bool, is_linear: bool, is_grouped: bool, drops: bool) -> int:
    kind = kind_of(name)
    if kind == "recurrent":
        raise CannotTell(f"{name} is a recurrent layer: no model of that kind is in the data it has learned from")
    if kind == "conv1d":
        kind = "linear" if is_linear else "convolution"
    if kind == "convolution" and is_grouped:
        kind = "grouped"
    if kind == "dropout" and not drops:
        kind = "shape"  # it returns its input
    if kind == "activation" and inplace and function_of(name) not in _COPIED:
        kind = "rectifier"  # what overwrites its input keeps its output
    return INDEX[kind]


_NOTHING = ("0", "0.0")
_COPIED = tuple(map(FUNCTIONS.index, ("SiLU", "Mish", "Hardswish", "ReLU6")))  # these keep a copy of their input
_LIKE_IMAGES = frozenset(INDEX[kind] for kind in ("convolution", "grouped", "transposed", "batch_norm"))
_LIKE_ROWS = frozenset(INDEX[kind] for kind in ("linear", "attention", "embedding"))
_MAY_BE_LAST = frozenset((INDEX["linear"], INDEX["norm"]))
_NORM_OF_ROWS = re.compile(r"\w*(Layer|RMS)Norm")
_CHANNELS_FIRST = ("Dense", "EinsumDense")  # of Keras: the reader of its summaries has moved them


def _channels(layers: tuple[Layer, ...], kinds: list[int]) -> Iterator[int]:
    """The second size of images and signals, else the last size. With three sizes only the layers around distinguish a
    signal from a sequence; with more, they show whether images have their channels last."""
    signal, wide = False, 0
    for layer, kind in zip(layers, kinds, strict=True):
        shape = layer.output
        rank = len(shape)
        if kind in _LIKE_ROWS:
            signal = False
        elif rank == 3 and kind in _LIKE_IMAGES:
            signal = True
        if rank < 2:
            yield 1
        elif 4 <= rank <= 5:
            if kind in _MAY_BE_LAST and _takes_last(layer, kind):
                wide = shape[-1]
            elif kind in _LIKE_IMAGES:
                wide = 0
            yield wide if shape[-1] == wide else shape[1]
        else:
            yield shape[1] if signal and rank == 3 else shape[-1]


def _takes_last(layer: Layer, kind: int) -> bool:
    """Linear layers and norms of rows work on the last size."""
    wide = layer.output[-1]
    if kind == INDEX["linear"]:
        return layer.kind not in _CHANNELS_FIRST
    is_of_rows = kind == INDEX["norm"] and _NORM_OF_ROWS.fullmatch(layer.kind) is not None
    return is_of_rows and layer.parameters in (0, wide, 2 * wide)


def _element_bytes(described: Described, columns: Columns) -> NDArray[np.float64]:
    """Bytes of an element of each layer's output."""
    if described.dtype in HALF or not described.autocast:
        return np.full(columns.count, 2.0 if described.dtype in HALF else 4.0)
    # The last layer at or before each that decides: products give half precision, all but _FOLLOWS 32 bits.
    decides = ~_FOLLOWS[columns.kinds] | (columns.names == "Softplus")
    last = np.maximum.accumulate(np.where(decides, np.arange(columns.count), -1))
    half = (last >= 0) & CAST[columns.kinds[np.maximum(last, 0)]]
    return np.where(half, 2.0, 4.0)


def _attention(described: Described, columns: Columns, unseen: Unseen) -> tuple[float, float]:
    """Heads and length of the sequence. If the heads are unknown, they have 64 channels, the most common size: as many
    heads as make up the input of the layer after attention. A fused projection is three times as wide."""
    linear = columns.kinds == INDEX["linear"]
    after = linear & (unseen.pairs > 0)
    widths = columns.inputs[after] / columns.rows[after] if after.any() else columns.channels[linear]
    width = np.median(widths) if len(widths) else 64.0
    length = (columns.rows[linear] / (described.batch or 1)).max(initial=1.0)
    return float(described.heads or max(1.0, round(width / 64))), float(length)
