"""From a model's description to numbers: the one definition for learning and for serving.

A summary contains all that is needed: for each layer its kind, the size of its output and its parameters; of the run
the batch, the optimizer and the number format. `guess` is the memory reserved by two simulated steps (`layer_chain`);
the models learn how far the truth differs from it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.column_reading import LayerReading, read_layers
from carma.trial.layers.columns import Columns, flags
from carma.trial.layers.description import HALF, Described, Layer, slots_of
from carma.trial.layers.kinds import FUNCTIONS, INDEX, KINDS, function_of, kind_of
from gpumemnet import Family
from gpumemnet.serving.layer_chain import play
from gpumemnet.serving.saved_tensors import IS_VIEW, MIB, Held, held, temporaries_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    scalars: NDArray[np.float32]  # as FEATURES names them; sizes are log2(1 + size)
    kinds: NDArray[np.int64]  # of each layer, indices in KINDS
    tokens: NDArray[np.float32]  # of each layer, as TOKEN names them
    way: str = ""  # how it is trained (`way_of`)
    names: tuple[str, ...] = ()  # class name of each layer: nothing is learned from it


def features(described: Described) -> Features:
    """Raises CannotTell."""
    reading = read_layers(described)
    described, columns = reading.described, reading.columns
    holds = held(reading)
    played = play(reading, reading.heads if described.attention == "eager" else 0.0)
    return Features(
        family=_family(described.layers, columns),
        scalars=_scalars(reading, holds, played),
        kinds=columns.kinds,
        tokens=_tokens(columns, holds.kept, described),
        way=way_of(described),
        names=tuple(layer.kind for layer in described.layers),
    )


def way_of(described: Described) -> str:
    """The optimizer by its tensors for each weight, kept and temporary, and the number format: no size shows these, and
    the data has some combinations only. `2+1 fp16-amp`: two tensors of state for each weight, one more in a step."""
    kind = described.autocast or described.dtype
    number = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(kind, kind)
    number = f"{number}-amp" if described.autocast else number
    return f"{slots_of(described)}+{temporaries_of(described):g} {number}"


_CONVOLUTIONS = flags("convolution", "grouped", "transposed")


def _family(layers: tuple[Layer, ...], columns: Columns) -> Family:
    linear = np.flatnonzero(columns.kinds == INDEX["linear"]).tolist()
    deep = sum(len(layers[place].output) >= 3 for place in linear)
    convolutions = np.count_nonzero(_CONVOLUTIONS[columns.kinds])
    attentions = np.count_nonzero(columns.kinds == INDEX["attention"])
    if attentions or (deep >= 2 and deep > 4 * convolutions):
        return "transformer" if convolutions <= deep + 4 * attentions else "cnn"
    return "cnn" if convolutions else "mlp"


def _scalars(reading: LayerReading, holds: Held, played: tuple[float, float]) -> NDArray[np.float32]:
    described, columns = reading.described, _without_views(reading.columns)
    batch = described.batch or 1
    rows = columns.rows / batch
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
    found |= _by_kind(columns)
    scalars = np.log2(1.0 + np.array([found.get(name, 0.0) for name in FEATURES]))
    for name, value in _settings(described).items():
        scalars[PLACE[name]] = value
    return scalars.astype(np.float32)


def _by_kind(columns: Columns) -> dict[str, float]:
    """Number of layers of each kind, and the sum of their outputs."""
    counts = np.bincount(columns.kinds, minlength=len(KINDS)).tolist()
    sums = np.bincount(columns.kinds, columns.outputs, len(KINDS)).tolist()
    found = {f"count_{kind}": count for kind, count in zip(KINDS, counts, strict=True)}
    return found | {f"output_{kind}": total for kind, total in zip(KINDS, sums, strict=True)}


def _without_views(columns: Columns) -> Columns:
    """Flatten and Identity are modules in some lists and functions in others, and hold no memory."""
    real = ~IS_VIEW[columns.kinds] | (columns.parameters > 0)
    if real.all() or not real.any():
        return columns
    return Columns(**{name: column[real] for name, column in vars(columns).items()})


def _settings(described: Described) -> dict[str, float]:
    """Features that are no sizes."""
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
    sized = np.stack(
        [columns.outputs * 4 / MIB, columns.parameters * size / MIB, kept, columns.channels, columns.rows], axis=1
    )
    logs = np.log2(1e-3 + sized)
    return np.concatenate([logs, columns.inplace[:, None]], axis=1).astype(np.float32)
