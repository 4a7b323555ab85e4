"""The tensors of each layer, as sizes in bytes for the allocator: allocated, kept, freed."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.column_reading import CAST, LayerReading
from carma.trial.layers.columns import Columns, flags, shifted
from carma.trial.layers.description import HALF, slots_of
from carma.trial.layers.functions import find_sums
from carma.trial.layers.kinds import INDEX
from gpumemnet.serving.caching_allocator import SMALL
from gpumemnet.serving.conv_scratch import scratch_of
from gpumemnet.serving.repeated_layers import find_tied, spans_of
from gpumemnet.serving.saved_tensors import (
    BACK_MORE,
    IS_VIEW,
    KEEPS_OUTPUT,
    KEPT_MORE,
    arriving_bytes,
    keeping_of,
    temporaries_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_IMAGES = flags("convolution", "grouped", "transposed", "batch_norm", "norm")
_OF_SCORES = flags("dropout", "softmax")
_COPIES_OF_A_VIEW = 2  # of its gradient, if a function overwrote it


def _whole(*columns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bytes, in the allocator's steps; 0 for tensors of the small pool."""
    found = _rounded(np.array(columns)).astype(np.int64)
    found[found < SMALL] = 0
    return found


def _rounded(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.ceil(sizes / 512) * 512
    return found


def _of_names(names: list[str], counts: Mapping[str, int]) -> list[int]:
    """The count of each name; 0 for unknown names."""
    if counts.keys().isdisjoint(names):
        return [0] * len(names)
    return [counts.get(name, 0) for name in names]


class Sizes:
    """Lists have an entry for each layer. `heads`: of attention that stores its scores, else 0."""

    def __init__(self, reading: LayerReading, heads: float) -> None:
        described, columns = reading.described, reading.columns
        self._reading, self.count = reading, columns.count
        self.amp = bool(described.autocast)
        came = self._arriving_bytes()
        before = reading.before.copy()
        before[0] = True
        met = ~before & (columns.inputs > shifted(columns.outputs, 0.0))
        size = 2.0 if described.dtype in HALF else 4.0
        self.half, self.half_loss = self.amp or size == 2.0, self.amp and reading.each[-1] == 2.0
        first = prod(described.input) * 4 if described.input else _whole(columns.inputs[:1] * came[:1])[0, 0]
        self.first = int(first)
        self.last = int(columns.outputs[-1] * size)
        self.slots, self.temporaries = slots_of(described), int(temporaries_of(described))
        self.scratch = scratch_of(described)
        self._weights(size)
        names = [layer.kind for layer in described.layers]
        self.kept_more, self.back_more = _of_names(names, KEPT_MORE), _of_names(names, BACK_MORE)
        self._kept(before, came, met)
        self._branches(before, met, heads)

    def _arriving_bytes(self) -> NDArray[np.float64]:
        """Bytes of an element of each input. A layer that takes its neighbour's input casts it once more."""
        came, unseen = arriving_bytes(self._reading), self._reading.unseen
        for place in np.flatnonzero(unseen.no_input & (unseen.pairs == 0)).tolist():
            came[place] = came[place - 1]
        return came

    def _weights(self, size: float) -> None:
        """Weights that layers share are one tensor; the sum of their gradients is computed at the last of them."""
        columns = self._reading.columns
        biases = np.where(columns.parameters > 2 * columns.channels, columns.channels * size, 0.0)
        whole = columns.parameters * size - biases
        tied = find_tied(columns, self._reading.described.parameters)
        once = np.where(tied >= 0, 0.0, whole)
        halves = columns.parameters * 2.0 * self.amp * CAST[columns.kinds]
        found = _whole(whole, once, biases, halves)
        self.gradients, self.weights, self.biases, self.halves = found.tolist()
        self.weighs: list[bool] = np.any(found, axis=0).tolist()  # whether there is a gradient of any
        self.passing = [0] * self.count
        for place in np.flatnonzero(tied >= 0).tolist():
            owner = int(tied[place])
            kept_at = max(owner, *(np.flatnonzero(tied == owner).tolist()))
            for one in (owner, place):
                if one != kept_at and self.gradients[one]:
                    self.passing[one], self.gradients[one] = self.gradients[one], 0
        sizes = np.concatenate((once, biases))
        self.small = int(_rounded(sizes[sizes + 511 < SMALL]).sum())

    def _kept(self, before: NDArray[np.bool_], came: NDArray[np.float64], met: NDArray[np.bool_]) -> None:
        """`came`: bytes of an element of the input. `met`: branches join before the layer."""
        columns, each, unseen = self._reading.columns, self._reading.each, self._reading.unseen
        keeping = keeping_of(self._reading)
        kinds, elements = columns.kinds, columns.inputs
        takes = (keeping.takes & ~unseen.no_input) | unseen.new_input
        copied = self.amp * (CAST[kinds] * (came > 2.0) * 2.0 + (kinds == INDEX["norm"]) * (came < 4.0) * 4.0)
        new = takes & (~before | unseen.new_input) & (copied == 0)
        found = _whole(
            columns.outputs * each,
            elements * came,
            elements * copied * (takes | CAST[kinds]),
            np.where(new, elements * came, 0.0),
            (columns.outputs * keeping.inside + unseen.elements) * each,
            columns.outputs * keeping.masks,
            np.where(met & (copied > 0) & CAST[kinds], elements * came, 0.0),
        )
        self.outputs, self.inputs, self.copies, extras, inside, self.masks, self.joined = found.tolist()
        beside = zip(self.halves, self.copies, extras, inside, strict=True)
        self.beside = [tuple(filter(None, sizes)) if any(sizes) else () for sizes in beside]
        self.keeps_output = KEEPS_OUTPUT[kinds].tolist()
        self.keeps_now = (takes & before & ~unseen.new_input & (copied == 0)).tolist()
        over_view = shifted(np.char.startswith(columns.names, "InstanceNorm"), False) & columns.inplace
        for place in np.flatnonzero(over_view).tolist():
            self.back_more[place] += _COPIES_OF_A_VIEW

    def _branches(self, before: NDArray[np.bool_], met: NDArray[np.bool_], heads: float) -> None:
        columns, unseen, kinds = self._reading.columns, self._reading.unseen, self._reading.columns.kinds
        is_view = IS_VIEW[kinds] | _scores(columns, unseen.pairs * heads)
        is_sum = find_sums(kinds, before)
        self.is_view, self.is_sum = is_view.tolist(), is_sum.tolist()
        self.before_sum = _next_is_sum(is_sum, is_view).tolist()
        self.is_norm = (kinds == INDEX["norm"]).tolist()
        self.is_over = (columns.inplace & (kinds == INDEX["rectifier"])).tolist()
        self.is_met = met.tolist()
        self.spans = spans_of(columns) if self._reading.described.checkpointing else [(0, self.count, False)]
        begins = {begin for begin, _, again in self.spans if again}
        self.adds = [is_sum and place not in begins for place, is_sum in enumerate(self.is_sum)]
        self.pairs = (unseen.pairs * heads).astype(np.int64).tolist()
        self.drops = bool((kinds == INDEX["dropout"]).any())
        self.fans, self.skips = unseen.fans, _skips(columns, before)


def _next_is_sum(is_sum: NDArray[np.bool_], is_view: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the next layer that is no view takes a sum of each layer's output and a shortcut."""
    count = len(is_sum)
    places = np.where(is_view, count, np.arange(count))
    follows = np.append(np.minimum.accumulate(places[::-1])[::-1], count)[1:]
    found: NDArray[np.bool_] = np.append(is_sum, False)[follows]
    return found


def _skips(columns: Columns, before: NDArray[np.bool_]) -> dict[int, int]:
    """Layers that take the output of the layer before, joined with that of an earlier one, and which one that is."""
    outputs, inputs = columns.outputs.tolist(), columns.inputs.tolist()
    found: dict[int, int] = {}
    images = _IMAGES[columns.kinds]
    for place in np.flatnonzero(images & ~before).tolist():
        other = inputs[place] - outputs[place - 1] if place else 0.0
        if other > 0:
            earlier = next((near for near in range(place - 2, -1, -1) if outputs[near] == other), None)
            if earlier is not None:
                found[place] = earlier
    return found


def _scores(columns: Columns, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Dropouts and softmaxes of attention's scores: what they keep is counted with attention."""
    sizes = set(scores[scores > 0].tolist())
    is_score = [size in sizes for size in columns.outputs.tolist()] if sizes else False
    found: NDArray[np.bool_] = _OF_SCORES[columns.kinds] & is_score
    return found
