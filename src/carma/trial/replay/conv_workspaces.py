"""cuDNN's workspace for a convolution: the measured one if there is one, otherwise a prediction.

cuDNN picks an engine by rules of its own, and the engine's workspace is then a formula (`conv_formulas.py`). So a
forest of decision trees picks the formula, and others give what is added to it. `lab/tools/fit_workspaces.py` makes the
file that is shipped; rows that `carma calibrate` measured on this server's GPU take precedence.

With `cudnn.benchmark` torch tries all engines that fit into free memory when it meets a shape for the first time,
empties its cache, and keeps the fastest engine. That memory depends on the GPU's free memory; on an empty GPU it is
`trial_bytes`.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.trial.replay import card_constants
from carma.trial.replay.conv_formulas import MORE, OTHER, formula_bytes
from carma.trial.replay.conv_shapes import ConvShape, Row, features, of_call, of_row, scratch_bytes, tensor_bytes
from carma.trial.replay.replay import NO_SCRATCH, Scratch
from carma.trial.report import Call

FORMAT = 1
SHIPPED = Path(__file__).parent.parent / "data" / "nvidia-h200.conv.json.gz"


class DecisionTree(Record, frozen=True, kw_only=True):
    """Nodes in the order left, right: the left child is the next node. The feature of a leaf is -1."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]  # of a leaf: its answer
    right: tuple[int, ...]

    def __call__(self, values: tuple[float, ...]) -> float:
        at = 0
        while (asked := self.feature[at]) >= 0:
            at = at + 1 if values[asked] <= self.threshold[at] else self.right[at]
        return self.threshold[at]


class LearntChoice(Record, frozen=True, kw_only=True):
    """Which formula holds for a shape, and what is added to it."""

    formulas: tuple[str, ...]  # the most frequent first
    choose: tuple[DecisionTree, ...]  # a formula, by its index
    more: tuple[DecisionTree, ...]  # log2 of the bytes added to it
    other: tuple[DecisionTree, ...]  # if no formula holds: log2 of the bytes over those of all tensors
    measured: tuple[tuple[ConvShape, int], ...] = ()  # shapes for which the trees are wrong, with their bytes

    def scratch_bytes(self, shape: ConvShape) -> int:
        values = features(shape)
        votes = Counter(int(tree(values)) for tree in self.choose)
        name = self.formulas[min(votes, key=lambda place: (-votes[place], place))]
        if name == OTHER:
            return int(2 ** _mean(self.other, values) * tensor_bytes(shape))
        known = formula_bytes(name, shape)
        return known + int(2 ** _mean(self.more, values)) if name.endswith(MORE) else known


class ConvModel(Record, frozen=True, kw_only=True):
    """Learnt from one GPU's rows."""

    format: int = FORMAT
    gpu: str
    torch: str
    cudnn: str = ""
    rows: int  # number of rows that it was learnt from
    call: LearntChoice
    trial: LearntChoice  # the largest of the engines that `cudnn.benchmark` tries


class ConvWorkspaces:
    """Measured shapes take precedence over the model."""

    def __init__(self, model: ConvModel, measured: Iterable[tuple[ConvShape, int]] = ()) -> None:
        """A measured shape with `benchmark` has the memory of the trial, not of the engine that was kept."""
        self._model = model
        self._calls, self._trials = dict(model.call.measured), dict(model.trial.measured)
        for shape, size in measured:
            (self._trials if shape.benchmark else self._calls)[shape] = size

    @classmethod
    def from_rows(cls, rows: Iterable[Row], model: ConvModel | None = None) -> ConvWorkspaces:
        """The model with the rows of a GPU; rows of other operators are ignored."""
        found = ((shape, scratch_bytes(row)) for row in rows if (shape := of_row(row)) is not None)
        return cls(model or shipped_model(), found)

    def scratch_bytes(self, shape: ConvShape) -> int:
        found = self._calls.get(shape)
        return self._model.call.scratch_bytes(shape) if found is None else found

    def __call__(self, call: Call) -> Scratch:
        shape = of_call(call)
        if shape is None:
            return NO_SCRATCH
        size = self.scratch_bytes(shape)
        return Scratch(transient_bytes=(size,) if size > 0 else (), trial_bytes=self._trial_bytes(shape))

    def _trial_bytes(self, shape: ConvShape) -> int:
        found = self._trials.get(shape) if shape.benchmark else 0
        return self._model.trial.scratch_bytes(shape) if found is None else found


@cache
def shipped_model() -> ConvModel:
    return msgspec.json.decode(gzip.decompress(SHIPPED.read_bytes()), type=ConvModel)


@cache
def shipped_convolutions() -> ConvWorkspaces:
    return ConvWorkspaces(shipped_model())


def convolutions_of(file: Path | None) -> ConvWorkspaces:
    """The model with the measured rows of the GPU of a file of constants; the shipped rows are in the model."""
    if file is None or file.parent == card_constants.SHIPPED or not card_constants.rows_file(file).is_file():
        return shipped_convolutions()
    return ConvWorkspaces.from_rows(card_constants.read_rows(card_constants.rows_file(file)))


def _mean(trees: tuple[DecisionTree, ...], values: tuple[float, ...]) -> float:
    return sum(tree(values) for tree in trees) / len(trees)
