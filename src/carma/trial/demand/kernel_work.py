"""The kernels of one training step, as far as a list of layers shows them: arithmetic, bytes, blocks and launches.

Each layer is a few kernels of the forward and of the backward pass. Functions that are no modules (sums, attention,
gates) are found as for memory (layers/functions.py). The optimizer is one kernel over all weights. This module only
counts; `prediction` computes times.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.column_reading import LayerReading, read_layers
from carma.trial.layers.columns import Columns
from carma.trial.layers.description import HALF, Described, Layer, slots_of
from carma.trial.layers.functions import find_sums
from carma.trial.layers.kinds import INDEX, TORCH_ATTENTION

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Kernels by the resource that limits them.
KERNELS = ("product", "convolution", "grouped", "attention", "elements", "norm", "optimizer", "embedding", "cast")
PRODUCT, CONVOLUTION, GROUPED, ATTENTION, ELEMENTS, NORM, OPTIMIZER, EMBEDDING, CAST = range(len(KERNELS))
NUMBERS = ("fp32", "tf32", "half")  # formats of the arithmetic
FP32, TF32, HALVES = range(len(NUMBERS))
COLUMNS = ("kernel", "flops", "bytes", "blocks", "launches", "number", "count")

TILE = 128  # rows and columns of a product that one block computes
EACH = 1024  # elements that one block processes
_WINDOW = 64.0  # places in a window of attention: 7 times 7, or 8 times 8
_NOT_FITTED = ("EmbeddingBag",)  # in no run that constants were fitted on, and unlike other embeddings
_MOST_SPLITS, _SPLIT_ROWS = 64, 2048  # of the sum that is a gradient of weights
_KNOWN_IN = ("in_channels", "in_features", "nx")
# Of torch's optimizers (foreach): passes over each weight in a step, and kernels for a group of tensors.
_PASSES = {"SGD": (3.0, 1.0), "Adam": (18.0, 10.0), "AdamW": (18.0, 11.0), "RMSprop": (12.0, 6.0),
           "Adagrad": (12.0, 6.0)}  # fmt: skip
_MOMENTUM, _OTHER = (9.0, 3.0), (14.0, 8.0)
_TENSORS_AT_ONCE, _WEIGHTS_AT_ONCE = 48, 65_536 * 320


@dataclass(frozen=True)
class StepWork:
    """One step, or several: the columns of `kernels` have a value for each kernel, the other arrays one for each step.

    The kernels of step k start at `begins[k]`.
    """

    kernels: NDArray[np.float64]  # as COLUMNS names them; each distinct kernel once, with its count
    begins: NDArray[np.int64]
    layers: NDArray[np.float64]
    tensors: NDArray[np.float64]  # of weights
    scaled: NDArray[np.bool_]  # losses are scaled and checked (float16)
    channels_last: NDArray[np.bool_]  # of each kernel
    copied_bytes: NDArray[np.float64]  # from the host; 0 where a data loader does that in parallel
    known: float  # share of outputs and of weights in layers of known kinds


class _Step:
    """Kernels are added layer by layer."""

    def __init__(self, reading: LayerReading, tf32: bool) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.tensors, self.inputs_wanted = 0, False
        self._reading, self._described = reading, reading.described
        self._columns, self._unseen = reading.columns, reading.unseen
        self._amp, self._half = bool(self._described.autocast), self._described.dtype in HALF
        self._number = HALVES if self._amp or self._half else TF32 if tf32 else FP32
        self._heads = max(1.0, reading.heads)
        self._sums = find_sums(reading.columns.kinds, reading.before)

    def add(self, kernel: int, flops: float, size: float, blocks: float, launches: float, number: int = -1) -> None:
        number = self._number if number < 0 else number
        self.rows.append((kernel, flops, size, max(blocks, 1.0), launches, number))

    def ahead(self, kernel: int, flops: float, size: float, blocks: float, launches: float, number: int = -1) -> None:
        """A kernel of the forward pass: with checkpointing nearly all of it is computed twice."""
        for _ in range(2 if self._described.checkpointing else 1):
            self.add(kernel, flops, size, blocks, launches, number)

    def layer(self, place: int, layer: Layer) -> None:
        columns, kind = self._columns, int(self._columns.kinds[place])
        out, came, each = float(columns.outputs[place]), float(columns.inputs[place]), float(self._reading.each[place])
        weights, wide = float(columns.parameters[place]), max(1.0, float(columns.channels[place]))
        is_norm = kind in (INDEX["norm"], INDEX["batch_norm"])
        if weights:
            self.tensors += 2 if is_norm or (weights % wide == 0 and weights > wide) else 1
        if kind == INDEX["shape"]:
            return
        if layer.kind == TORCH_ATTENTION:
            self._torch_attention(out / wide, wide, weights, each)
            return
        if kind in _PRODUCTS and weights:
            self._product(layer, kind, out, came, weights, wide, each)
            if self._unseen.pairs[place]:
                rows = max(out / wide, 1.0)
                pairs = _WINDOW * rows if "Window" in layer.kind else float(self._unseen.pairs[place])
                self._attention(pairs, rows, came / rows, each)
        elif kind == INDEX["embedding"]:
            self.add(EMBEDDING, 0.0, 5.0 * out * each + weights * each, out / EACH, 4.0)
        elif is_norm:
            self._norm(place, layer.kind, kind, came, out, each)
        else:
            self._elements(max(came, out), each)
        self._between(place, came, each)

    def _elements(self, count: float, each: float, forward: float = 2.0, backward: float = 3.0) -> None:
        self.ahead(ELEMENTS, 0.0, forward * count * each, count / EACH, 1.0)
        self.add(ELEMENTS, 0.0, backward * count * each, count / EACH, 1.0)

    def _between(self, place: int, came: float, each: float) -> None:
        """Branches that join before a layer, and functions that are no modules."""
        if place and not self._reading.before[place]:
            self._elements(came, each, 3.0, 2.0)
        if self._unseen.elements[place] and not self._unseen.pairs[place]:
            self._elements(float(self._unseen.elements[place]), each)

    def _norm(self, place: int, name: str, kind: int, came: float, out: float, each: float) -> None:
        """Most implementations of RMSNorm consist of several kernels."""
        more, forward, backward = (3.0, 5.0, 6.0) if "RMS" in name else (1.0, 1.0, 1.5)
        self.ahead(NORM, 0.0, (came + out) * each * more, out / (2 * EACH), forward)
        self.add(NORM, 0.0, 3.0 * out * each * more, out / (2 * EACH), backward)
        if self._sums[place]:
            self._elements(out, each, 3.0, 3.0)
        if self._amp and kind == INDEX["norm"]:
            self._cast(came)

    def _cast(self, count: float) -> None:
        """Two kernels: the cast to the other number format, and the cast of its gradient back."""
        for _ in range(2):
            self.add(CAST, 0.0, 6.0 * count, count / EACH, 1.0)

    def _product(
        self, layer: Layer, kind: int, out: float, came: float, weights: float, wide: float, each: float
    ) -> None:
        """Forward, the gradients of the input (except for the first layer), of the weights and of the bias."""
        kernel, number = PRODUCT, self._number
        if kind in _CONVOLUTIONS:  # torch computes them in TF32 by default
            kernel, number = GROUPED if kind == INDEX["grouped"] else CONVOLUTION, max(self._number, TF32)
        rows, into = out / wide, _channels_in(layer, came)
        flops = 2.0 * weights * (rows if kind != INDEX["transposed"] else max(1.0, came / into))
        size = (came + out) * each + weights * (2.0 if self._number == HALVES else 4.0)
        self.ahead(kernel, flops, size, _tiles(rows, wide), 2.0, number)
        if self.inputs_wanted:
            self.add(kernel, flops, size, _tiles(came / into, into), 1.0, number)
        splits = max(1.0, min(_MOST_SPLITS, rows / _SPLIT_ROWS))
        self.add(kernel, flops, size, _tiles(wide, weights / wide) * splits, 1.0, number)
        self.add(ELEMENTS, 0.0, out * each, out / EACH, 1.0)
        self._weights_done(weights)

    def _weights_done(self, weights: float) -> None:
        self.inputs_wanted = True
        if self._amp:
            self._cast(weights)

    def _torch_attention(self, rows: float, wide: float, weights: float, each: float) -> None:
        for outputs in (3.0 * wide, wide):
            flops = 2.0 * rows * outputs * wide
            size = (rows * outputs + rows * wide + outputs * wide) * each
            self.ahead(PRODUCT, flops, size, _tiles(rows, outputs), 2.0)
            self.add(PRODUCT, flops, size, _tiles(rows, wide), 1.0)
            self.add(PRODUCT, flops, size, _tiles(outputs, wide), 2.0)
        self._fused(rows * rows / (self._described.batch or 1), rows, wide, each)
        self._weights_done(weights)

    def _attention(self, pairs: float, rows: float, wide: float, each: float) -> None:
        """`pairs` of queries and keys, for each head."""
        if self._described.attention == "eager":
            scores, flops = pairs * self._heads, 4.0 * pairs * wide
            self.ahead(ATTENTION, flops, 4.0 * scores * each, scores / TILE**2, 2.0)
            self.add(ATTENTION, 2.0 * flops, 8.0 * scores * each, scores / TILE**2, 4.0)
            self.ahead(ELEMENTS, 0.0, 10.0 * scores * each, scores / EACH, 5.0)
            self.add(ELEMENTS, 0.0, 8.0 * scores * each, scores / EACH, 4.0)
        else:
            self._fused(pairs, rows, wide, each)
        for _ in range(2):  # heads are made contiguous, and back
            self.add(ELEMENTS, 0.0, 3.0 * rows * wide * each, rows * wide / EACH, 3.0)

    def _fused(self, pairs: float, rows: float, wide: float, each: float) -> None:
        flops, blocks = 4.0 * pairs * wide, rows / TILE * self._heads
        self.ahead(ATTENTION, flops, 4.0 * rows * wide * each, blocks, 4.0)
        self.add(ATTENTION, 2.5 * flops, 8.0 * rows * wide * each, blocks, 6.0)

    def loss_and_optimizer(self) -> None:
        described, last = self._described, float(self._columns.outputs[-1])
        self.add(ELEMENTS, 0.0, 24.0 * last, last / EACH, 3.0)
        self.add(ELEMENTS, 0.0, 16.0 * last, last / EACH, 3.0)
        weights = float(described.parameters or self._columns.parameters.sum())
        passes, kernels = _PASSES.get(described.optimizer, _OTHER)
        if described.optimizer == "SGD" and slots_of(described):
            passes, kernels = _MOMENTUM
        groups = max(ceil(self.tensors / _TENSORS_AT_ONCE), weights / _WEIGHTS_AT_ONCE, 1.0)
        size = passes * weights * (2.0 if self._half else 4.0)
        self.add(OPTIMIZER, 0.0, size, weights * passes / 8 / EACH, kernels * groups)


_CONVOLUTIONS = tuple(INDEX[kind] for kind in ("convolution", "grouped", "transposed"))
_PRODUCTS = (*_CONVOLUTIONS, INDEX["linear"], INDEX["attention"])


def work_of(described: Described, *, tf32: bool = False) -> StepWork:
    """`tf32`: whether matrix products use it, which no description contains. Raises CannotTell."""
    reading = read_layers(described)
    step = _Step(reading, tf32)
    for place, layer in enumerate(reading.described.layers):
        step.layer(place, layer)
    step.loss_and_optimizer()
    kernels, counts = np.unique(np.array(step.rows, np.float64), axis=0, return_counts=True)
    return StepWork(
        kernels=np.column_stack((kernels, counts.astype(np.float64))),
        begins=np.zeros(1, np.int64),
        layers=np.array([reading.columns.count], np.float64),
        tensors=np.array([step.tensors], np.float64),
        scaled=np.array([described.autocast == "float16"]),
        channels_last=np.full(len(kernels), described.channels_last),
        copied_bytes=np.zeros(1),
        known=_known(reading.columns),
    )


def _known(columns: Columns) -> float:
    """Known share of outputs or of weights, whichever is less."""
    odd = (columns.kinds == INDEX["other"]) | np.isin(columns.names, _NOT_FITTED)
    sums = ((sizes[odd].sum(), sizes.sum()) for sizes in (columns.outputs, columns.parameters))
    return 1.0 - max(float(part / whole) if whole else 0.0 for part, whole in sums)


def _tiles(rows: float, columns: float) -> float:
    return float(ceil(rows / TILE) * ceil(columns / TILE))


def _channels_in(layer: Layer, came: float) -> float:
    """Channels of the input of a product; a part of the input if they are not a whole number."""
    known = next((layer.attributes[name] for name in _KNOWN_IN if name in layer.attributes), "")
    if known.isdecimal() and int(known):
        return float(known)
    shape = layer.inputs[0] if layer.inputs else ()
    found = (shape[1] if len(shape) >= 3 and "Conv" in layer.kind else shape[-1]) if len(shape) > 1 else 0
    return float(found) if found else min(came, 64.0)
