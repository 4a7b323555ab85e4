"""From a model's description to numbers: the one definition for learning and for serving.

Everything here can be read off a summary: for each layer its kind, the size of its output, its parameters; of the run
the batch, the optimizer, the number format. `guess` is the plain arithmetic over these (weights, gradients, optimizer,
outputs kept for the backward pass); what is learned is how far the truth is from it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from carma.estimate.described import Described, Layer
from carma.estimate.gpumemnet.kinds import FUNCTIONS, INDEX, KINDS, function_of, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Family = Literal["mlp", "cnn", "transformer"]
MIB = 1 << 20

SETTINGS = ("fp32", "amp", "half", "slots", "checkpointing", "channels_last")
TOTALS = (
    "batch", "layers", "parameters", "activations", "activations_batch", "input", "largest_output", "second_output",
    "largest_weight", "positions", "width", "static_mib", "kept_mib", "guess_mib",
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

# How much of an output stays for the backward pass, in outputs: the input of the next layer is this one's output, so
# each is counted where it is made. Rough on purpose; the learned part corrects it by the sums of each kind.
_KEPT = {
    "linear": 1.0, "convolution": 1.0, "grouped": 1.0, "transposed": 1.0, "batch_norm": 1.0, "norm": 1.0,
    "activation": 1.0, "dropout": 1.25, "pooling": 1.0, "embedding": 1.0, "attention": 3.0, "softmax": 1.0,
    "shape": 0.0, "upsampling": 1.0, "merge": 1.0, "other": 1.0,
}  # fmt: skip
_KEPT_OF = np.array([_KEPT[kind] for kind in KINDS])
_HALF = ("float16", "bfloat16")
# Autocast computes these in half precision; the others keep what comes, or go back to 32 bits.
_CAST = np.array([kind in ("linear", "convolution", "grouped", "transposed", "attention") for kind in KINDS])
_FOLLOWS = np.array([kind in ("activation", "dropout", "pooling", "batch_norm", "shape", "merge") for kind in KINDS])


@dataclass(frozen=True)
class Features:
    family: Family
    scalars: NDArray[np.float32]  # as FEATURES names them; sizes are logarithms to base 2 of one more
    kinds: NDArray[np.int64]  # of each layer, places in KINDS
    tokens: NDArray[np.float32]  # of each layer, as TOKEN names them


@dataclass(frozen=True)
class Columns:
    """The layers, column by column."""

    kinds: NDArray[np.int64]
    outputs: NDArray[np.float64]  # elements, the batch included
    parameters: NDArray[np.float64]
    channels: NDArray[np.float64]
    inplace: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return len(self.kinds)


class CannotTell(Exception):
    """Why there are no features of this description, as a sentence."""


def features(described: Described) -> Features:
    if not described.batch:
        raise CannotTell("the batch size is not known; --batch tells it")
    if not any(layer.output for layer in described.layers):
        raise CannotTell(
            "the summary does not tell the shapes of the layers' outputs; "
            "a torchinfo or torchsummary table does, or --input beside print(model)"
        )
    columns = _columns(described.layers)
    scalars, kept = _scalars(described, columns)
    return Features(_family(described.layers, columns), scalars, columns.kinds, _tokens(columns, kept, described))


def _columns(layers: tuple[Layer, ...]) -> Columns:
    count = len(layers)
    kinds = np.fromiter((_kind(layer) for layer in layers), np.int64, count)
    outputs = np.fromiter((math.prod(layer.output) if layer.output else 0 for layer in layers), np.float64, count)
    parameters = np.fromiter((layer.parameters for layer in layers), np.float64, count)
    channels = np.fromiter((_channels(layer) for layer in layers), np.float64, count)
    inplace = np.fromiter((layer.inplace for layer in layers), np.bool_, count)
    return Columns(kinds, outputs, parameters, channels, inplace)


def _kind(layer: Layer) -> int:
    kind = kind_of(layer.kind)
    if kind == "recurrent":
        raise CannotTell(f"{layer.kind} is a recurrent layer: no model of that kind is in the data it has learned from")
    if kind == "conv1d":
        kind = (
            "linear" if "nf" in layer.attributes or "nx" in layer.attributes or not layer.attributes else "convolution"
        )
    if kind == "convolution" and layer.attributes.get("groups", "1") != "1":
        kind = "grouped"
    return INDEX[kind]


def _channels(layer: Layer) -> int:
    """Of images and signals the second place, of everything else the last."""
    shape = layer.output
    if len(shape) < 2:
        return 1
    return shape[1] if len(shape) in (4, 5) and shape[1] > 0 else shape[-1]


def _family(layers: tuple[Layer, ...], columns: Columns) -> Family:
    linear = columns.kinds == INDEX["linear"]
    deep = sum(1 for layer, is_linear in zip(layers, linear, strict=True) if is_linear and len(layer.output) >= 3)
    convolutions = int(np.isin(columns.kinds, (INDEX["convolution"], INDEX["grouped"], INDEX["transposed"])).sum())
    attentions = int((columns.kinds == INDEX["attention"]).sum())
    if attentions or (deep >= 2 and deep > 4 * convolutions):
        return "transformer" if convolutions <= deep + 4 * attentions else "cnn"
    return "cnn" if convolutions else "mlp"


def _element_bytes(described: Described, columns: Columns) -> NDArray[np.float64]:
    """Of each layer's output. Under autocast matrix products come in half precision and what follows them stays so."""
    if described.dtype in _HALF:
        return np.full(columns.count, 2.0)
    if not described.autocast:
        return np.full(columns.count, 4.0)
    cast, follows = _CAST[columns.kinds], _FOLLOWS[columns.kinds]
    sizes = np.empty(columns.count)
    now = 4.0
    for place in range(columns.count):
        now = 2.0 if cast[place] else now if follows[place] else 4.0
        sizes[place] = now
    return sizes


def _scalars(described: Described, columns: Columns) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    batch = described.batch or 1
    size = 2.0 if described.dtype in _HALF else 4.0
    parameters = float(described.parameters if described.parameters is not None else columns.parameters.sum())
    slots = slots_of(described)
    kept = columns.outputs * _element_bytes(described, columns) * _KEPT_OF[columns.kinds] / MIB
    kept[columns.inplace] = 0.0
    static = parameters * (size * (2 + slots) + (2.0 if described.autocast else 0.0)) / MIB
    kept_mib = float(kept.sum())
    whole = kept_mib * (0.3 if described.checkpointing else 1.0)
    sums = np.bincount(columns.kinds, columns.outputs, len(KINDS))
    found: dict[str, float] = {
        "batch": batch,
        "layers": columns.count,
        "parameters": parameters,
        "activations": columns.outputs.sum() / batch,
        "activations_batch": columns.outputs.sum(),
        "input": float(math.prod(described.input)) if described.input else 0.0,
        "largest_weight": columns.parameters.max(initial=0.0),
        "positions": float(np.max(columns.outputs / np.maximum(columns.channels, 1.0) / batch, initial=0.0)),
        "width": columns.channels.max(initial=0.0),
        "static_mib": static,
        "kept_mib": kept_mib,
        "guess_mib": static + whole,
        "output_inplace": float(columns.outputs[columns.inplace].sum()),
    }
    largest = np.sort(columns.outputs)[::-1]
    found["largest_output"] = largest[0]
    found["second_output"] = largest[1] if len(largest) > 1 else 0.0
    for kind, counted, total in zip(KINDS, np.bincount(columns.kinds, minlength=len(KINDS)), sums, strict=True):
        found[f"count_{kind}"], found[f"output_{kind}"] = counted, total
    sized = np.array([found.get(name, 0.0) for name in FEATURES])
    scalars = np.log2(1.0 + sized)
    for name, value in _plain(described, slots).items():
        scalars[PLACE[name]] = value
    return scalars.astype(np.float32), kept


def _plain(described: Described, slots: int) -> dict[str, float]:
    """What is no size."""
    angle = _angle(described.layers)
    return {
        "cos_function": 0.0 if angle is None else math.cos(angle),
        "sin_function": 0.0 if angle is None else math.sin(angle),
        "fp32": float(described.dtype not in _HALF and not described.autocast),
        "amp": float(bool(described.autocast)),
        "half": float(described.dtype in _HALF),
        "slots": float(slots),
        "checkpointing": float(described.checkpointing),
        "channels_last": float(described.channels_last),
    }


def slots_of(described: Described) -> int:
    """Adam's two where nobody tells: the most common one, and the one that takes most."""
    return 2 if described.optimizer_slots is None else described.optimizer_slots


def _angle(layers: tuple[Layer, ...]) -> float | None:
    named = Counter(layer.kind for layer in layers if kind_of(layer.kind) == "activation")
    found = [(count, place) for name, count in named.items() if (place := function_of(name)) is not None]
    return None if not found else 2 * math.pi * max(found)[1] / len(FUNCTIONS)


def _tokens(columns: Columns, kept: NDArray[np.float64], described: Described) -> NDArray[np.float32]:
    size = 2.0 if described.dtype in _HALF else 4.0
    positions = columns.outputs / np.maximum(columns.channels, 1.0)
    sized = np.stack(
        [columns.outputs * 4 / MIB, columns.parameters * size / MIB, kept, columns.channels, positions], axis=1
    )
    logs = np.log2(1e-3 + sized)
    return np.concatenate([logs, columns.inplace[:, None]], axis=1).astype(np.float32)
