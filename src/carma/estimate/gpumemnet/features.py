"""From a model's description to numbers: the one definition for learning and for serving.

Everything here can be read off a summary: for each layer its kind, the size of its output, its parameters; of the run
the batch, the optimizer, the number format. `guess` is what two steps reserve when they are played through an allocator
(`kept`, `chain`); what is learned is how far the truth is from it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from carma.estimate.described import Described, Layer
from carma.estimate.gpumemnet.chain import play
from carma.estimate.gpumemnet.columns import Columns, flags, inputs_of
from carma.estimate.gpumemnet.kept import (
    HALF,
    IS_VIEW,
    MIB,
    TORCH_ATTENTION,
    Held,
    basis_of,
    held,
    slots_of,
    temporaries_of,
)
from carma.estimate.gpumemnet.kinds import FUNCTIONS, INDEX, KINDS, function_of, kind_of
from carma.estimate.gpumemnet.operators import layers_of
from carma.estimate.gpumemnet.unseen import Unseen, find_unseen

if TYPE_CHECKING:
    from numpy.typing import NDArray

Family = Literal["mlp", "cnn", "transformer"]
SETTINGS = ("fp32", "amp", "half", "slots", "checkpointing", "channels_last", "eager", "temporaries")
TOTALS = (
    "batch", "layers", "parameters", "activations", "activations_batch", "inputs_batch", "input", "largest_output",
    "second_output", "last_output", "largest_weight", "positions", "width", "resting_mib", "gradients_mib",
    "allocated_mib", "kept_mib", "scores_mib", "guess_mib",
)  # fmt: skip
FEATURES = (
    *TOTALS,
    *(f"count_{kind}" for kind in KINDS),
    *(f"output_{kind}" for kind in KINDS),
    "output_inplace",
    "cos_function",
    "sin_function",
    *SETTINGS,
)
PLACE = {name: place for place, name in enumerate(FEATURES)}
TOKEN = ("output_mib", "weight_mib", "kept_mib", "channels", "positions", "inplace")


@dataclass(frozen=True)
class Features:
    family: Family
    scalars: NDArray[np.float32]  # as FEATURES names them; sizes are logarithms to base 2 of one more
    kinds: NDArray[np.int64]  # of each layer, places in KINDS
    tokens: NDArray[np.float32]  # of each layer, as TOKEN names them
    way: str = ""  # how it is trained, as `way_of` writes it
    names: tuple[str, ...] = ()  # of each layer, as its framework calls the class: nothing is learned from them


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


def features(described: Described) -> Features:
    check_told(described)
    described = layers_of(described)
    columns = columns_of(described)
    basis = basis_of(described, columns)
    unseen = find_unseen(columns, basis.before, described.batch or 1)
    heads, length = attention_of(described, columns, unseen)
    holds = held(described, columns, unseen, basis, heads, length)
    family = _family(described.layers, columns)
    played = play(described, columns, unseen, basis, heads if described.attention == "eager" else 0.0)
    return Features(
        family,
        _scalars(described, columns, holds, played),
        columns.kinds,
        _tokens(columns, holds.kept, described),
        way_of(described),
        tuple(layer.kind for layer in described.layers),
    )


def way_of(described: Described) -> str:
    """The optimizer by what it keeps and what a step of it makes, and the number format: what no size tells, and what
    goes together in some runs only. `2+1 fp16-amp`: two tensors of state for each weight, one more in a step."""
    kind = described.autocast or described.dtype
    number = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(kind, kind)
    number = f"{number}-amp" if described.autocast else number
    return f"{slots_of(described)}+{temporaries_of(described):g} {number}"


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
_CONVOLUTIONS = flags("convolution", "grouped", "transposed")
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


def _family(layers: tuple[Layer, ...], columns: Columns) -> Family:
    linear = np.flatnonzero(columns.kinds == INDEX["linear"]).tolist()
    deep = sum(len(layers[place].output) >= 3 for place in linear)
    convolutions = np.count_nonzero(_CONVOLUTIONS[columns.kinds])
    attentions = np.count_nonzero(columns.kinds == INDEX["attention"])
    if attentions or (deep >= 2 and deep > 4 * convolutions):
        return "transformer" if convolutions <= deep + 4 * attentions else "cnn"
    return "cnn" if convolutions else "mlp"


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


def _scalars(described: Described, every: Columns, holds: Held, played: tuple[float, float]) -> NDArray[np.float32]:
    batch, columns = described.batch or 1, _without_views(every)
    rows = columns.outputs / np.maximum(columns.channels, 1.0) / batch
    largest = np.sort(columns.outputs)[::-1]
    found: dict[str, float] = {
        "batch": batch,
        "layers": columns.count,
        "parameters": described.parameters if described.parameters is not None else columns.parameters.sum(),
        "activations": columns.outputs.sum() / batch,
        "activations_batch": columns.outputs.sum(),
        "inputs_batch": columns.inputs.sum(),
        "input": float(math.prod(described.input)) if described.input else 0.0,
        "largest_output": largest[0],
        "second_output": largest[1] if len(largest) > 1 else 0.0,
        "last_output": columns.outputs[-1],
        "largest_weight": columns.parameters.max(initial=0.0),
        "positions": rows.max(initial=0.0),
        "width": columns.channels.max(initial=0.0),
        "resting_mib": holds.resting,
        "gradients_mib": holds.gradients,
        "allocated_mib": played[1],
        "kept_mib": float(holds.kept.sum()),
        "scores_mib": holds.scores,
        "guess_mib": played[0],
        "output_inplace": float(columns.outputs[columns.inplace].sum()),
    }
    counts, sums = (
        np.bincount(columns.kinds, minlength=len(KINDS)),
        np.bincount(columns.kinds, columns.outputs, len(KINDS)),
    )
    for kind, counted, total in zip(KINDS, counts, sums, strict=True):
        found[f"count_{kind}"], found[f"output_{kind}"] = counted, total
    scalars = np.log2(1.0 + np.array([found.get(name, 0.0) for name in FEATURES]))
    for name, value in _plain(described).items():
        scalars[PLACE[name]] = value
    return scalars.astype(np.float32)


def _without_views(columns: Columns) -> Columns:
    """Flatten and Identity are modules in some lists and functions in others, and hold nothing: they are no sizes."""
    real = ~IS_VIEW[columns.kinds] | (columns.parameters > 0)
    if real.all() or not real.any():
        return columns
    return Columns(**{name: column[real] for name, column in vars(columns).items()})


def _plain(described: Described) -> dict[str, float]:
    """What is no size."""
    angle = _angle(described.layers)
    return {
        "cos_function": 0.0 if angle is None else math.cos(angle),
        "sin_function": 0.0 if angle is None else math.sin(angle),
        "fp32": float(described.dtype not in HALF and not described.autocast),
        "amp": float(bool(described.autocast)),
        "half": float(described.dtype in HALF),
        "slots": float(slots_of(described)),
        "checkpointing": float(described.checkpointing),
        "channels_last": float(described.channels_last),
        "eager": float(described.attention == "eager"),
        "temporaries": temporaries_of(described),
    }


def _angle(layers: tuple[Layer, ...]) -> float | None:
    named = Counter([layer.kind for layer in layers])
    acts = [(count, name) for name, count in named.items() if kind_of(name) in ("activation", "rectifier")]
    found = [(count, place) for count, name in acts if (place := function_of(name)) is not None]
    return None if not found else 2 * math.pi * max(found)[1] / len(FUNCTIONS)


def _tokens(columns: Columns, kept: NDArray[np.float64], described: Described) -> NDArray[np.float32]:
    size = 2.0 if described.dtype in HALF else 4.0
    positions = columns.outputs / np.maximum(columns.channels, 1.0)
    sized = np.stack(
        [columns.outputs * 4 / MIB, columns.parameters * size / MIB, kept, columns.channels, positions], axis=1
    )
    logs = np.log2(1e-3 + sized)
    return np.concatenate([logs, columns.inplace[:, None]], axis=1).astype(np.float32)
