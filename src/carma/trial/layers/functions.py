"""Memory that functions between layers keep and that are no modules: attention, gates, activations.

A run of linear layers with nothing in between is read by its widths. Queries, keys and values are followed by a layer
whose input is as wide as the queries. The layers of a gate take the same input and meet in a product. A layer that
takes the output of the one before it has, nearly always, an activation before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.columns import Columns, flags, shifted
from carma.trial.layers.kinds import INDEX, TORCH_ATTENTION

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Most functional activations of today keep their input (GELU, SiLU); ReLU does not.
_ACTIVATION = 0.8
_ACTIVATIONS = flags("activation", "rectifier")
_NORMS = flags("batch_norm", "norm")
_CONVOLUTIONS = flags("convolution", "grouped", "transposed")
_CONVOLVED = 0.35  # in convolutional networks many are ReLU, and many work in place
_GATE = 6  # maximum number of layers of a gate
_BETWEEN = flags("dropout", "softmax")
_HANDS_ON = flags("dropout", "shape")
_PRODUCTS = flags("linear", "attention")


@dataclass(frozen=True)
class Unseen:
    elements: NDArray[np.float64]  # kept because of each layer, beside what the layer itself keeps
    no_input: NDArray[np.bool_]  # layers whose input other layers have kept
    new_input: NDArray[np.bool_]  # layers whose input is a tensor of its own
    fans: dict[
        int, list[int]
    ]  # for a layer after attention or a gate: the layers that its gradient goes to, last first
    pairs: NDArray[np.float64]  # of queries and keys, for each head, if attention is a function before the layer


class _LinearRuns:
    """Reads runs of linear layers. Places are those in the lists that it was made with."""

    def __init__(self, columns: Columns, places: NDArray[np.int64], batch: int) -> None:
        self.inputs, self.outputs = columns.inputs[places].tolist(), columns.outputs[places].tolist()
        self.rows: list[float] = columns.rows[places].tolist()
        self.batch = batch
        self.elements, self.pairs = np.zeros((2, len(places)))
        self.no_input, self.new_input = np.zeros((2, len(places)), np.bool_)
        self.fans: dict[int, list[int]] = {}

    def read(self, begin: int, end: int, *, gated: bool) -> None:
        """A run of linear layers; `gated`: an activation stands before it that its first layer does not take."""
        place = begin
        if gated and end - begin >= 2 and self.follows(begin):
            self.elements[begin] += self.outputs[begin - 1] + self.outputs[begin]  # the factors are kept
            self.fans[begin + 1] = [begin, begin - 1]
            place = begin + 2
        while place < end:
            place += self.split(place, end) or self.gate(place, end) or self.fused(place, end) or self.plain(place, end)

    def split(self, place: int, end: int) -> int:
        """Queries, keys, values, and the layer after attention."""
        if place + 4 > end:
            return 0
        inputs, outputs = self.inputs[place : place + 4], self.outputs[place : place + 4]
        pairs = (inputs[1], inputs[2]), (outputs[1], outputs[2]), (inputs[3], outputs[0])
        if not all(_alike(*pair) for pair in pairs):
            return 0
        self.elements[place : place + 3] += outputs[:3]
        shared = outputs[1] < 0.9 * outputs[0] * inputs[1] / inputs[0]
        self.fans[place + 3] = [place + 2, place + 1, place]
        self.attend(place + 3, place, place + 1, wide=outputs[0], shared=shared)
        self.no_input[place + 1 : place + 3] |= _alike(inputs[0], inputs[1])
        return 4

    def fused(self, place: int, end: int) -> int:
        """Queries, keys and values in one projection, and the layer after attention."""
        if place + 2 > end or self.follows(place):
            return 0
        given, taken = self.outputs[place], self.inputs[place + 1]
        if not 1.02 * taken < given <= 3.02 * taken:
            return 0
        self.elements[place] += given
        self.fans[place + 1] = [place]
        self.attend(place + 1, place, place, wide=taken, shared=given < 2.9 * taken)
        return 2

    def attend(self, after: int, queries: int, keys: int, *, wide: float, shared: bool) -> None:
        """The weighted sum, its contiguous copy, and keys and values for every head if heads share them."""
        self.pairs[after] = self.rows[queries] * self.rows[keys] / self.batch
        self.elements[after] += wide * (3 if shared else 1)
        self.no_input[after] = True

    def gate(self, place: int, end: int) -> int:
        if place + 3 > end:
            return 0
        inputs, outputs = self.inputs[place : place + 3], self.outputs[place : place + 3]
        pairs = (inputs[0], inputs[1]), (outputs[0], outputs[1]), (inputs[2], outputs[0])
        if not all(_alike(*pair) for pair in pairs):
            return 0
        self.elements[place] += (2 + _ACTIVATION) * outputs[0]
        self.no_input[place + 1], self.new_input[place + 2] = True, True
        self.fans[place + 2] = [place + 1, place]
        return 3

    def plain(self, place: int, end: int) -> int:
        if place + 1 < end and self.follows(place):
            self.elements[place] += _ACTIVATION * self.outputs[place]
        return 1

    def follows(self, place: int) -> bool:
        """Whether the next layer takes this one's output."""
        return _alike(self.inputs[place + 1], self.outputs[place])


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= 0.02 * other


def _gates(columns: Columns, before: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Squeeze and excitation: a mean of each channel, a few layers, an activation with as many numbers as the mean, and
    a layer that does not take these. The other factor is kept, unless a ReLU has kept it; the product is a new tensor,
    however many of its size exist already."""
    kinds, outputs, inputs = columns.kinds, columns.outputs, columns.inputs
    found, product = np.zeros(columns.count), np.zeros(columns.count, np.bool_)
    for mean in np.flatnonzero((kinds == INDEX["pooling"]) & (outputs * 4 <= inputs)).tolist():
        for end in range(mean + 2, min(mean + _GATE, columns.count - 1)):
            if outputs[end] == outputs[mean] and _ACTIVATIONS[kinds[end]] and not before[end + 1]:
                found[mean] = inputs[mean] if mean and kinds[mean - 1] != INDEX["rectifier"] else 0.0
                product[end + 1] = inputs[end + 1] == inputs[mean] and _CONVOLUTIONS[kinds[end + 1]]
                break
    return found, product


def _functions(columns: Columns) -> NDArray[np.float64]:
    """A network without any activation of images has them as functions: after each norm, or after each product if there
    is no norm. An activation inside a gate or in the head shows which function it is."""
    kinds, rows = columns.kinds, columns.rows
    acts, convolutions, norms = _ACTIVATIONS[kinds], _CONVOLUTIONS[kinds], _NORMS[kinds]
    if (acts & (rows > rows.min())).any() or not convolutions.any():
        return np.zeros(columns.count)
    share = float((kinds == INDEX["activation"]).any()) if acts.any() else _CONVOLVED
    after = norms if norms.any() else convolutions
    found: NDArray[np.float64] = np.where(after & np.r_[convolutions[1:], False], columns.outputs, 0.0)
    return share * found


def find_unseen(columns: Columns, before: NDArray[np.bool_], batch: int) -> Unseen:
    """Dropouts, softmaxes and norms that do nothing do not separate the layers of attention."""
    through = (columns.kinds == INDEX["shape"]) & (columns.names != "Flatten")
    seen = np.flatnonzero(~(_BETWEEN[columns.kinds] | through))
    kinds = columns.kinds[seen]
    finder = _LinearRuns(columns, seen, batch)
    edges = np.flatnonzero(np.diff(kinds == INDEX["linear"], prepend=False, append=False))
    gated = (shifted(_ACTIVATIONS[kinds], False) & ~before[seen]).tolist()
    for begin, end in edges.reshape(-1, 2).tolist():
        finder.read(begin, end, gated=gated[begin])
    gates, new_input = _gates(columns, before)
    elements, no_input = gates + _functions(columns), np.zeros(columns.count, np.bool_)
    elements[seen] += finder.elements
    no_input[seen] = finder.no_input
    new_input[seen] |= finder.new_input
    # Torch's own module never stores its scores.
    writes = (columns.kinds == INDEX["attention"]) & (columns.names != TORCH_ATTENTION)
    pairs: NDArray[np.float64] = np.where(writes, columns.rows * columns.rows / batch, 0.0)
    pairs[seen] += finder.pairs
    where = seen.tolist()
    fans = {where[place]: [where[one] for one in ones] for place, ones in finder.fans.items()}
    return Unseen(elements, no_input, new_input, fans, pairs)


def find_sums(kinds: NDArray[np.int64], before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Norms whose input is the sum of a branch and its shortcut: norms after a linear layer, after its dropout, or
    after an identity in place of one."""
    others = np.maximum.accumulate(np.where(_HANDS_ON[kinds], -1, np.arange(len(kinds))))
    last = shifted(others, -1)  # the last layer before each that is not one of these
    found: NDArray[np.bool_] = (kinds == INDEX["norm"]) & (last >= 0) & _PRODUCTS[kinds[last]] & before
    return found
