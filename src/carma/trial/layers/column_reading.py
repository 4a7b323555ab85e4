"""From a model's description to its layers column by column: kinds, sizes, channels, inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from carma.trial.layers.columns import Columns, inputs_of
from carma.trial.layers.description import Described, Layer
from carma.trial.layers.functions import Unseen
from carma.trial.layers.kinds import FUNCTIONS, INDEX, function_of, kind_of
from carma.trial.layers.saved_tensors import TORCH_ATTENTION


class CannotTell(Exception):
    """Why there are no features of this description, as a sentence."""


def check_told(described: Described) -> None:
    """Raises CannotTell where the least that everything here needs is not told."""
    if not described.batch:
        raise CannotTell("the batch size is not known; with --summary, --batch tells it")
    if not any(layer.output for layer in described.layers):
        raise CannotTell(
            "the summary does not tell the shapes of the layers' outputs; "
            "a torchinfo or torchsummary table does, or --input beside print(model)"
        )


def columns_of(described: Described) -> Columns:
    layers, count = described.layers, len(described.layers)
    names = [layer.kind for layer in layers]
    known = map(_known_kind, names)
    kinds = np.array([_kind(layer) if kind is None else kind for layer, kind in zip(layers, known, strict=True)])
    outputs = np.fromiter((math.prod(layer.output) if layer.output else 0 for layer in layers), np.float64, count)
    weights = map(_parameters, layers) if TORCH_ATTENTION in names else (layer.parameters for layer in layers)
    parameters = np.fromiter(weights, np.float64, count)
    channels = np.fromiter(_channels(layers, kinds.tolist()), np.float64, count)
    inplace = np.fromiter((layer.inplace for layer in layers), np.bool_, count)
    first = float(math.prod(described.input)) if described.input else outputs[0]
    told = np.fromiter((math.prod(layer.inputs[0]) if layer.inputs else 0 for layer in layers), np.float64, count)
    inputs = told
    if not told.all():  # a trial run tells them all
        dimensions = np.fromiter((len(layer.output) - 2 for layer in layers), np.int64, count)
        follow = inputs_of(kinds, outputs, parameters, channels, dimensions, first)
        inputs = np.where(told > 0, told, follow)
    return Columns(
        kinds=kinds,
        outputs=outputs,
        parameters=parameters,
        channels=channels,
        inplace=inplace,
        inputs=inputs,
        names=np.array(names),
    )


def _parameters(layer: Layer) -> int:
    """Some lists leave out the weights of torch's attention that turn its sum into its output."""
    width = layer.output[-1] if layer.output else 0
    if layer.kind == TORCH_ATTENTION and layer.parameters in (3 * width * width, 3 * width * (width + 1)):
        return layer.parameters // 3 * 4
    return layer.parameters


@lru_cache(maxsize=4096)
def _known_kind(name: str) -> int | None:
    """None where more than the name tells it."""
    kind = kind_of(name)
    return None if kind in _NOT_BY_NAME else INDEX[kind]


def _kind(layer: Layer) -> int:
    return _worked_out(layer) if layer.attributes else _bare_kind(layer.kind, layer.inplace)


@lru_cache(maxsize=4096)
def _bare_kind(name: str, inplace: bool) -> int:
    """Of a layer without attributes: most summaries tell none."""
    return _worked_out(Layer(kind=name, inplace=inplace))


def _worked_out(layer: Layer) -> int:
    kind = kind_of(layer.kind)
    if kind == "recurrent":
        raise CannotTell(f"{layer.kind} is a recurrent layer: no model of that kind is in the data it has learned from")
    if kind == "conv1d":
        kind = (
            "linear" if "nf" in layer.attributes or "nx" in layer.attributes or not layer.attributes else "convolution"
        )
    if kind == "convolution" and layer.attributes.get("groups", "1") != "1":
        kind = "grouped"
    if kind == "dropout" and layer.attributes.get("p") in _NOTHING:
        kind = "shape"  # it hands on what it is given
    if kind == "activation" and layer.inplace and function_of(layer.kind) not in _COPIED:
        kind = "rectifier"  # what is written over its input keeps its output
    return INDEX[kind]


_NOT_BY_NAME = ("recurrent", "conv1d", "convolution", "dropout", "activation")
_NOTHING = ("0", "0.0")
_COPIED = tuple(
    FUNCTIONS.index(name) for name in ("SiLU", "Mish", "Hardswish", "ReLU6")
)  # these keep a copy of their input
_LIKE_IMAGES = frozenset(INDEX[kind] for kind in ("convolution", "grouped", "transposed", "batch_norm"))
_NORM_OF_ROWS = re.compile(r"\w*(Layer|RMS)Norm")
_MAY_TAKE_LAST = frozenset((INDEX["linear"], INDEX["norm"]))
_TURNED = ("Dense", "EinsumDense")
_LIKE_ROWS = frozenset(INDEX[kind] for kind in ("linear", "attention", "embedding"))


def _channels(layers: tuple[Layer, ...], kinds: list[int]) -> Iterator[int]:
    """Of images and signals the second place, of everything else the last. Of three places only the layers around tell
    whether it is a signal or a sequence; of more, whether images have their channels in the last place."""
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
            if kind in _MAY_TAKE_LAST and _takes_last(layer, kind):
                wide = shape[-1]
            elif kind in _LIKE_IMAGES:
                wide = 0
            yield wide if shape[-1] == wide else shape[1]
        else:
            yield shape[1] if signal and rank == 3 else shape[-1]


def _takes_last(layer: Layer, kind: int) -> bool:
    """Linear layers and norms of a row work on the last place; of Keras the reader has turned it to the second."""
    wide = layer.output[-1]
    if kind == INDEX["linear"]:
        return layer.kind not in _TURNED
    is_of_rows = kind == INDEX["norm"] and _NORM_OF_ROWS.fullmatch(layer.kind) is not None
    return is_of_rows and layer.parameters in (0, wide, 2 * wide)


def attention_of(described: Described, columns: Columns, unseen: Unseen) -> tuple[float, float]:
    """Heads and length of the sequence. Heads of 64 are the most common, where nobody tells: so many as make up what
    the layer behind attention takes. Queries, keys and values in one projection are three times as wide."""
    linear = columns.kinds == INDEX["linear"]
    positions = columns.outputs / np.maximum(columns.channels, 1.0)
    rows = positions[linear] / (described.batch or 1)
    behind = linear & (unseen.pairs > 0)
    widths = columns.inputs[behind] / positions[behind] if behind.any() else columns.channels[linear]
    width = _median(widths) if len(widths) else 64.0
    return float(described.heads or max(1.0, round(width / 64))), float(rows.max(initial=1.0))


def _median(column: NDArray[np.float64]) -> float:
    """Numpy's own takes ten times as long for the few that there are."""
    ordered, count = np.sort(column), len(column)
    return float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2
