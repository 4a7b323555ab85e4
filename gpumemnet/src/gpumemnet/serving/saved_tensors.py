"""What each layer keeps for the backward pass, as far as a list of layers shows it.

Some layers keep their input (a convolution), some their output (ReLU). The size of an input follows from the weights:
if it is larger than the output of the layer before, branches have joined. `layer_chain` simulates when these tensors
are allocated and freed. What the list does not show is left to the learned models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from carma.trial.layers.column_reading import CAST, LayerReading
from carma.trial.layers.columns import NEAR, Columns, flags, shifted
from carma.trial.layers.description import HALF, Described, slots_of
from carma.trial.layers.kinds import INDEX, KINDS, PRODUCTS, TORCH_ATTENTION
from gpumemnet.serving.repeated_layers import spans_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIB = 1 << 20
KEEPS_INPUT = flags(*PRODUCTS, "batch_norm", "norm", "activation", "pooling", "max_pooling", "other")
KEEPS_OUTPUT = flags("rectifier", "softmax", "attention")
IS_VIEW = flags("shape")
_WHOLE_SAMPLES = re.compile(r"\w*(DropPath|StochasticDepth|DropConnect)\w*")
MASK_BYTES = np.array([{"dropout": 1.0, "max_pooling": 8.0}.get(kind, 0.0) for kind in KINDS])
# Inside an attention layer: queries, keys, values and their weighted sum, beside the output itself. Torch's own module
# swaps batch and sequence, and keeps the copies.
_INSIDE, _INSIDE_TORCH = 4.0, 5.0
# Softsign is a quotient and keeps its denominator beside its input; so do the parts of GELUs that are written out.
KEPT_MORE = {"Softsign": 1, "QuickGELUActivation": 1, "QuickGELU": 1, "NewGELUActivation": 3, "FastGELUActivation": 5}
BACK_MORE = {"Softsign": 4, "PReLU": 1, "Tanhshrink": 1}  # needed for a moment by the backward pass
# Tensors of the size of all weights that torch's optimizers allocate in a step (foreach).
_TEMPORARIES = {"sgd": 0.0, "adagrad": 2.0}


@dataclass(frozen=True)
class Held:
    """Memory held between passes, in MiB."""

    resting: float  # weights and the optimizer's state
    gradients: float
    kept: NDArray[np.float64]  # of each layer, for the backward pass
    scores: float  # of one layer's attention, if they are stored


class Keeping(NamedTuple):
    """The facts about each layer from which sums and steps are computed."""

    takes: NDArray[np.bool_]  # whether it keeps its input: not if another layer keeps it already
    inside: NDArray[np.float64]  # elements that it keeps inside, for each element of its output
    masks: NDArray[np.float64]  # bytes of its mask, for each element of its output


def keeping_of(reading: LayerReading) -> Keeping:
    columns, batch = reading.columns, reading.described.batch or 1
    inside = np.where(columns.names == TORCH_ATTENTION, _INSIDE_TORCH, _INSIDE)
    is_mean = (columns.kinds == INDEX["pooling"]) & (columns.outputs <= columns.channels * batch)  # it needs nothing
    return Keeping(
        takes=KEEPS_INPUT[columns.kinds] & ~is_mean & ~_kept_before(columns, reading.before),
        inside=np.where(columns.kinds == INDEX["attention"], inside, 0.0),
        masks=_mask_bytes(columns),
    )


def temporaries_of(described: Described) -> float:
    plain = described.optimizer.lower()
    return 1.0 if plain == "sgd" and slots_of(described) else _TEMPORARIES.get(plain, 1.0)


def _mask_bytes(columns: Columns) -> NDArray[np.float64]:
    """Bytes of the mask for each element of a layer's output. A layer that drops whole samples has one number for each
    of them."""
    found: NDArray[np.float64] = MASK_BYTES[columns.kinds]
    drops = np.flatnonzero(columns.kinds == INDEX["dropout"])
    whole = [_drops_samples(name) for name in columns.names[drops].tolist()]
    found[drops[whole]] = 0.0
    return found


@lru_cache(maxsize=4096)
def _drops_samples(name: str) -> bool:
    return _WHOLE_SAMPLES.fullmatch(name) is not None


def arriving_bytes(reading: LayerReading) -> NDArray[np.float64]:
    """Bytes of an element of each layer's input. Joined branches take the widest format among them."""
    columns = reading.columns
    came = shifted(reading.each, reading.each[0])
    if not reading.described.autocast:
        return came
    came[0] = 4.0
    outputs, inputs = columns.outputs.tolist(), columns.inputs.tolist()
    known = {inputs[0]: 4.0}
    for place in np.flatnonzero(~reading.before).tolist():
        if place and inputs[place] > outputs[place - 1]:
            other = inputs[place] - outputs[place - 1]
            came[place] = max(came[place], known.get(other, 0.0))
            known[inputs[place]] = float(came[place])
    return came


def held(reading: LayerReading) -> Held:
    described, columns = reading.described, reading.columns
    size = 2.0 if described.dtype in HALF else 4.0
    parameters = float(described.parameters if described.parameters is not None else columns.parameters.sum())
    whole = parameters * size / MIB
    kept = _kept(reading)
    if described.checkpointing:
        kept = _recomputed(columns, kept, columns.inputs * arriving_bytes(reading) / MIB)
    scores = float(described.batch or 1) * reading.heads * reading.length * reading.length * 4.0 / MIB
    return Held(
        resting=whole * (1 + slots_of(described)),
        gradients=whole,
        kept=kept,
        scores=scores if described.attention == "eager" else 0.0,
    )


def _kept(reading: LayerReading) -> NDArray[np.float64]:
    """MiB that each layer keeps: its input, unless the layer before keeps that already, and its output."""
    columns, unseen, kinds = reading.columns, reading.unseen, reading.columns.kinds
    keeping = keeping_of(reading)
    # A view returns its input, so the last layer that is no view decides whether that is kept.
    real = np.maximum.accumulate(np.where(IS_VIEW[kinds], 0, np.arange(columns.count)))
    is_kept = shifted(KEEPS_OUTPUT[kinds[real]], False)
    takes = (keeping.takes & ~(reading.before & is_kept) & ~unseen.no_input) | unseen.new_input
    width = shifted(reading.each, reading.each[0])  # bytes of an element of the input
    if reading.described.autocast:
        # The input is cast, and the copy is kept.
        width = np.where(CAST[kinds], 2.0, np.where(kinds == INDEX["norm"], 4.0, width))
    elements = columns.outputs * (KEEPS_OUTPUT[kinds] + keeping.inside) + unseen.elements
    kept: NDArray[np.float64] = np.where(takes, columns.inputs * width, 0.0) + elements * reading.each
    kept += columns.outputs * keeping.masks
    if reading.described.autocast:
        kept += np.where(CAST[kinds], columns.parameters * 2.0, 0.0)
    return kept / MIB


def _kept_before(columns: Columns, before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A layer beside others (a shortcut) takes what one of the last layers has taken, and kept, already."""
    found = np.zeros(columns.count, np.bool_)
    products = CAST[columns.kinds]
    taken = np.where(products, columns.inputs, -1.0).tolist()
    for place in np.flatnonzero(products & ~before).tolist():
        found[place] = taken[place] in taken[max(0, place - NEAR) : place]
    return found


def _recomputed(columns: Columns, kept: NDArray[np.float64], inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Memory with checkpointing: each recomputed block keeps its input, and one block exists in full."""
    stays, most, where = kept.copy(), 0.0, 0
    for begin, end, again in spans_of(columns):
        if again:
            whole = float(kept[begin:end].sum())
            most, where = max((most, where), (whole, begin), key=lambda one: one[0])
            stays[begin:end] = 0.0
            stays[begin] = inputs[begin]
    stays[where] += most
    return stays
