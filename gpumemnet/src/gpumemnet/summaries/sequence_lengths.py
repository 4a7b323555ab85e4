"""Converts a language model's table that was printed for one length to another (--input).

Outputs can be converted if it is certain for each row which of its sizes is the length: by its position, never by its
number alone, which may also be a width. If one row is uncertain, that is an error that names it: an answer for another
length than the one asked for is useless.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.errors import Usage
from carma.trial.layers.description import Layer
from carma.trial.layers.kinds import kind_of
from gpumemnet.summaries.shapes import Shape, show

_FIXED = ("linear", "conv1d", "norm", "embedding", "attention")  # their last size follows from their weights
_SCORES = ("softmax", "dropout")  # of attention: each word to each
_HINT = (
    "Print the table with as many words as it is trained with (torchinfo.summary(model, input_data=...)), or give "
    "print(model), which --input is for."
)


class _NotSure(Exception):
    """Why it is uncertain which size is the length."""


def words_of(layers: Sequence[Layer]) -> int | None:
    """The number of words of the table; None if its first layer is no embedding."""
    first = next((layer for layer in layers if layer.output), None)
    if first is None or kind_of(first.kind) != "embedding" or len(first.output) != 3:
        return None
    return first.output[1]


def at_length(
    layers: Sequence[Layer], batch: int, printed: int, sample: Shape
) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """The layers with outputs for the wanted number of words, and a remark."""
    if len(sample) != 1:
        raise Usage(
            f"--input {show(sample)} does not fit: the model looks up words, {printed:,} in a sample",
            "Of such a model --input is the number of words: --input 128.",
        )
    if sample[0] == printed:
        return tuple(layers), ()
    stretch = _Stretch(batch, printed, sample[0])
    remark = f"the table was printed for {printed:,} words: its outputs are turned into those of --input {sample[0]}"
    return tuple(stretch.layer(layer) for layer in layers), (remark,)


class _Stretch:
    def __init__(self, batch: int, printed: int, wanted: int) -> None:
        self._batch, self._printed, self._wanted = batch, printed, wanted
        self._width = 0  # of the last row of words

    def layer(self, layer: Layer) -> Layer:
        kind = kind_of(layer.kind)
        try:
            self._check_weights(layer, kind)
            output = self._shape(layer.output, kind)
            inputs = tuple(self._shape(shape, kind) for shape in layer.inputs)
        except _NotSure as why:
            raise Usage(
                f"the table was printed for {self._printed:,} words and cannot be turned into one for the "
                f"{self._wanted:,} of --input: {why} ({layer.name or layer.kind}, {list(layer.output)})",
                _HINT,
            ) from None
        self._width = output[-1] if len(output) == 3 else self._width
        if kind == "embedding" and inputs:
            inputs = (output[:-1],)  # the words
        return replace(layer, output=output, inputs=inputs)

    def _check_weights(self, layer: Layer, kind: str) -> None:
        """Refuses weights that depend on the length, and tables of positions that are too short."""
        shape, wide = layer.output, layer.output[-1] if layer.output else 1
        if kind == "embedding" and len(shape) == 3 and shape[0] == 1 < self._batch:
            places = layer.parameters // wide
            if 0 < places < self._wanted:
                raise Usage(
                    f"--input {self._wanted} does not fit: the model's table of places ({layer.name or layer.kind}) "
                    f"ends at {places:,} words",
                    f"Such a model takes up to --input {places}.",
                )
        taken = self._printed * self._width  # all words of a sample concatenated; a bias adds one
        if kind == "linear" and len(shape) == 2 and taken and layer.parameters // wide in (taken, taken + 1):
            raise _NotSure("the weights of a layer hang on the number of words")

    def _shape(self, shape: Shape, kind: str) -> Shape:
        if len(shape) < 2:
            return shape
        if kind == "embedding" and shape[0] == self._printed != self._batch and set(shape[:-1]) == {self._printed}:
            return (
                *(self._wanted for _ in shape[:-1]),
                shape[-1],
            )  # of positions or distances
        if shape[0] == self._batch * self._printed != self._batch:  # all words of the batch concatenated
            return (self._batch * self._wanted, *self._without(shape[1:], kind))
        if shape[0] not in (1, self._batch):
            raise _NotSure("its first size is not the batch")
        return (shape[0], *(self._without if len(shape) == 2 else self._rows)(shape[1:], kind))

    def _without(self, sizes: Shape, kind: str) -> Shape:
        """Refuses sizes that may be the number of words."""
        if self._printed in (sizes[:-1] if kind in _FIXED else sizes):
            raise _NotSure(f"a size of {self._printed:,} may be the number of words or another")
        return sizes

    def _rows(self, sizes: Shape, kind: str) -> Shape:
        """Rows of a batch: sequences of words, their heads, or scores of each word to each."""
        places = [place for place, size in enumerate(sizes) if size == self._printed]
        if kind in _FIXED and places[-1:] == [len(sizes) - 1]:
            places = places[:-1]
        is_scores = len(sizes) == 3 and places == [1, 2] and kind in _SCORES
        is_row = len(places) == 1 and places[0] < len(sizes) - 1
        if not (is_scores or is_row):
            raise _NotSure("it is not sure which of its sizes is the number of words")
        return tuple(self._wanted if place in places else size for place, size in enumerate(sizes))
