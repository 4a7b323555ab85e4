"""The plain arithmetic: what each layer keeps for the backward pass, as far as a list of layers tells.

Some layers keep their input (a convolution), some their output (ReLU). How large an input is follows from the weights:
where it is larger than what the layer before gave, branches have met. When these tensors come and go is played in
`chain`. What the list does not show (sums, workspaces, most functions that are no modules) is left to what is learned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.columns import Columns, flags, shifted
from carma.trial.layers.description import Described
from carma.trial.layers.functions import Unseen
from carma.trial.layers.kinds import INDEX, KINDS
from carma.trial.layers.repeated_layers import spans_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIB = 1 << 20
HALF = ("float16", "bfloat16")
_PRODUCTS = ("linear", "convolution", "grouped", "transposed", "attention")
KEEPS_INPUT = flags(*_PRODUCTS, "batch_norm", "norm", "activation", "pooling", "max_pooling", "other")
KEEPS_OUTPUT = flags("rectifier", "softmax", "attention")
IS_VIEW = flags("shape")
IS_PRODUCT = flags(*_PRODUCTS)
_NEAR = 14  # layers in which a shortcut begins and ends
# Autocast computes products in half precision; what follows them keeps what comes, the others go back to 32 bits.
CAST = flags(*_PRODUCTS)
_FOLLOWS = flags(
    "activation", "rectifier", "dropout", "pooling", "max_pooling", "batch_norm", "shape", "merge", "upsampling"
)
_WHOLE_SAMPLES = re.compile(r"\w*(DropPath|StochasticDepth|DropConnect)\w*")
MASK_BYTES = np.array([{"dropout": 1.0, "max_pooling": 8.0}.get(kind, 0.0) for kind in KINDS])
# Inside an attention layer: queries, keys, values and their weighted sum, beside the output itself. Torch's own module
# turns batch and sequence round, and keeps what it copies for that.
_INSIDE, _INSIDE_TORCH = 4.0, 5.0
TORCH_ATTENTION = "MultiheadAttention"
# Softsign is a quotient: its denominator is kept beside its input. What the backward pass needs for a moment.
# So do the parts of GELUs that are written out.
KEPT_MORE = {"Softsign": 1, "QuickGELUActivation": 1, "QuickGELU": 1, "NewGELUActivation": 3, "FastGELUActivation": 5}
BACK_MORE = {"Softsign": 4, "PReLU": 1, "Tanhshrink": 1}
# Tensors of the size of all weights that torch's optimizers make in a step (foreach).
_TEMPORARIES = {"sgd": 0.0, "adagrad": 2.0}


@dataclass(frozen=True)
class Held:
    """In MiB."""

    resting: float  # weights and the optimizer's state
    gradients: float
    kept: NDArray[np.float64]  # of each layer, for the backward pass
    scores: float  # of attention, where they are written out; one layer's


@dataclass(frozen=True)
class Basis:
    """What sums and steps are both worked out from, for each layer."""

    before: NDArray[np.bool_]  # whether it takes what the one before it gave
    each: NDArray[np.float64]  # bytes of an element of its output
    takes: NDArray[np.bool_]  # whether it keeps what it is given
    inside: NDArray[np.float64]  # for each element of its output: elements that it keeps inside
    masks: NDArray[np.float64]  # and bytes of its mask


def basis_of(described: Described, columns: Columns) -> Basis:
    before = _is_before(columns)
    return Basis(
        before=before,
        each=_element_bytes(described, columns),
        takes=_takes_input(described, columns, before),
        inside=_inside_of(columns),
        masks=_mask_bytes(columns),
    )


def slots_of(described: Described) -> int:
    """Adam's two where nobody tells: the most common one, and the one that takes most."""
    return 2 if described.optimizer_slots is None else described.optimizer_slots


def temporaries_of(described: Described) -> float:
    plain = described.optimizer.lower()
    if plain == "sgd" and slots_of(described):
        return 1.0
    return _TEMPORARIES.get(plain, 1.0)


def _element_bytes(described: Described, columns: Columns) -> NDArray[np.float64]:
    """Of each layer's output."""
    if described.dtype in HALF:
        return np.full(columns.count, 2.0)
    if not described.autocast:
        return np.full(columns.count, 4.0)
    # The last layer at or before each that decides: products give half precision, all but followers 32 bits.
    decides = ~_FOLLOWS[columns.kinds] | (columns.names == "Softplus")
    last = np.maximum.accumulate(np.where(decides, np.arange(columns.count), -1))
    half = (last >= 0) & CAST[columns.kinds[np.maximum(last, 0)]]
    return np.where(half, 2.0, 4.0)


def _mask_bytes(columns: Columns) -> NDArray[np.float64]:
    """For each element of a layer's output. What drops whole samples has one figure for each of them."""
    found: NDArray[np.float64] = MASK_BYTES[columns.kinds]
    drops = np.flatnonzero(columns.kinds == INDEX["dropout"])
    whole = [_drops_samples(name) for name in columns.names[drops].tolist()]
    found[drops[whole]] = 0.0
    return found


@lru_cache(maxsize=4096)
def _drops_samples(name: str) -> bool:
    return _WHOLE_SAMPLES.fullmatch(name) is not None


def _inside_of(columns: Columns) -> NDArray[np.float64]:
    """Elements that an attention layer keeps inside, for each of its output."""
    torch = columns.names == TORCH_ATTENTION
    found: NDArray[np.float64] = np.where(
        columns.kinds == INDEX["attention"], np.where(torch, _INSIDE_TORCH, _INSIDE), 0.0
    )
    return found


def arriving_bytes(described: Described, columns: Columns, basis: Basis) -> NDArray[np.float64]:
    """Of an element that goes into each layer. Branches that are joined take the widest format among them."""
    came = shifted(basis.each, basis.each[0])
    if not described.autocast:
        return came
    came[0] = 4.0
    outputs, inputs = columns.outputs.tolist(), columns.inputs.tolist()
    known = {inputs[0]: 4.0}
    for place in np.flatnonzero(~basis.before).tolist():
        if place and inputs[place] > outputs[place - 1]:
            other = inputs[place] - outputs[place - 1]
            came[place] = max(came[place], known.get(other, 0.0))
            known[inputs[place]] = float(came[place])
    return came


def held(described: Described, columns: Columns, unseen: Unseen, basis: Basis, heads: float, length: float) -> Held:
    """`heads` and `length` (of a sequence) are for attention whose scores are written out."""
    size = 2.0 if described.dtype in HALF else 4.0
    parameters = float(described.parameters if described.parameters is not None else columns.parameters.sum())
    whole = parameters * size / MIB
    kept = _kept(described, columns, unseen, basis)
    if described.checkpointing:
        came = arriving_bytes(described, columns, basis)
        kept = _recomputed(columns, kept, columns.inputs * came / MIB)
    scores = float(described.batch or 1) * heads * length * length * 4.0 / MIB
    return Held(
        resting=whole * (1 + slots_of(described)),
        gradients=whole,
        kept=kept,
        scores=scores if described.attention == "eager" else 0.0,
    )


def _is_before(columns: Columns) -> NDArray[np.bool_]:
    """Whether a layer takes what the one before it gave, as far as sizes tell."""
    before = shifted(columns.outputs, 0.0)
    found: NDArray[np.bool_] = np.abs(columns.inputs - before) <= 0.02 * before
    return found


def _takes_input(described: Described, columns: Columns, before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which layers keep what they are given: not what another has kept already, and a mean needs nothing."""
    is_mean = (columns.kinds == INDEX["pooling"]) & (columns.outputs <= columns.channels * (described.batch or 1))
    found: NDArray[np.bool_] = KEEPS_INPUT[columns.kinds] & ~is_mean & ~_seen_before(columns, before)
    return found


def _kept(described: Described, columns: Columns, unseen: Unseen, basis: Basis) -> NDArray[np.float64]:
    """MiB that stay because of each layer: its input, unless the layer before keeps that already, and its output."""
    kinds = columns.kinds
    # A view hands on what it was given: whether that is kept is told by the last layer that is none.
    real = np.maximum.accumulate(np.where(IS_VIEW[kinds], 0, np.arange(columns.count)))
    held = shifted(KEEPS_OUTPUT[kinds[real]], False)
    takes = (basis.takes & ~(basis.before & held) & ~unseen.no_input) | unseen.new_input
    width = shifted(basis.each, basis.each[0])  # bytes of an element that comes in
    if described.autocast:
        # Cast on the way in, and the copy is what is kept.
        width = np.where(CAST[kinds], 2.0, np.where(kinds == INDEX["norm"], 4.0, width))
    elements = columns.outputs * (KEEPS_OUTPUT[kinds] + basis.inside) + unseen.elements
    kept: NDArray[np.float64] = np.where(takes, columns.inputs * width, 0.0) + elements * basis.each
    kept += columns.outputs * basis.masks
    if described.autocast:
        kept += np.where(CAST[kinds], columns.parameters * 2.0, 0.0)
    return kept / MIB


def _seen_before(columns: Columns, is_before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A layer beside others (a shortcut) takes what one of the last layers has taken, and kept, already."""
    seen = np.zeros(columns.count, np.bool_)
    products = IS_PRODUCT[columns.kinds]
    taken = np.where(products, columns.inputs, -1.0).tolist()
    for place in np.flatnonzero(products & ~is_before).tolist():
        seen[place] = taken[place] in taken[max(0, place - _NEAR) : place]
    return seen


def _recomputed(columns: Columns, kept: NDArray[np.float64], inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each block that is computed again what went into it stays, and one block is there in full; the rest is kept as
    ever."""
    stays, most, where = kept.copy(), 0.0, 0
    for begin, end, again in spans_of(columns):
        if again:
            whole = float(kept[begin:end].sum())
            most, where = max((most, where), (whole, begin), key=lambda one: one[0])
            stays[begin:end] = 0.0
            stays[begin] = inputs[begin]
    stays[where] += most
    return stays
