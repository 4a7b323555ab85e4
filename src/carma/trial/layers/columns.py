"""The layers as columns of numbers, and the size of each layer's input, which a summary rarely contains.

Most layers return as many elements as they take. For products, the number of weights determines the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from carma.trial.layers.kinds import INDEX, KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAR = 14  # layers within which a shortcut begins and ends
_SIDES = (1.0, 3.0, 5.0, 7.0, 11.0, 2.0, 4.0)  # of kernels


def flags(*kinds: str) -> NDArray[np.bool_]:
    """Whether each kind is one of these; indexed with kinds, it answers for each layer."""
    return np.array([kind in kinds for kind in KINDS])


_RESIZE = flags("convolution", "grouped", "transposed", "pooling", "max_pooling", "upsampling", "embedding")


@dataclass(frozen=True)
class Columns:
    kinds: NDArray[np.int64]
    outputs: NDArray[np.float64]  # elements, the batch included
    parameters: NDArray[np.float64]
    channels: NDArray[np.float64]
    inplace: NDArray[np.bool_]
    inputs: NDArray[np.float64]  # elements, as far as the weights determine them
    names: NDArray[np.str_]  # as the framework has them

    @property
    def count(self) -> int:
        return len(self.kinds)

    @property
    def rows(self) -> NDArray[np.float64]:
        """Elements of the output for each channel."""
        return self.outputs / np.maximum(self.channels, 1.0)


Of = TypeVar("Of", bound=np.generic)


def shifted(column: NDArray[Of], first: object) -> NDArray[Of]:
    """The value of the layer before each; `first` for the first layer."""
    found = np.empty_like(column)
    found[:1] = first
    found[1:] = column[:-1]
    return found


def inputs_of(columns: Columns, dimensions: NDArray[np.int64], first: float) -> NDArray[np.float64]:
    """Elements of each layer's input; the `inputs` of `columns` are not used. `dimensions`: sides of an image (2)."""
    kinds, outputs = columns.kinds, columns.outputs
    before = shifted(outputs, max(first, 1.0))
    wide = shifted(columns.channels, 1.0)
    each = columns.parameters / np.maximum(columns.channels, 1.0)  # weights of one output, and perhaps a bias
    linear = (kinds == INDEX["linear"]) & (columns.parameters > 0)
    taken = np.where(np.abs(each - wide) <= 1.0, wide, np.floor(each))
    found = np.where(linear, taken * columns.rows, np.where(_RESIZE[kinds], before, outputs))
    places = 1 + np.flatnonzero(kinds[1:] == INDEX["convolution"])
    came = wide[places]
    asked = zip(each[places].tolist(), came.tolist(), np.maximum(dimensions[places], 1).tolist(), strict=True)
    positions = np.maximum(before[places] / np.maximum(came, 1.0), columns.rows[places])
    found[places] = np.array([_channels_in(*one) for one in asked]) * positions
    found = np.minimum(found, first + np.cumsum(before))  # no more than there was before
    _take_shortcuts(found, columns, dimensions)
    return found


@lru_cache(maxsize=4096)
def _channels_in(each: float, wide: float, dimensions: int) -> float:
    """Input channels of a convolution: those of the layer before if a kernel fits to them; else the fewest whole
    number."""
    areas = [side**dimensions for side in _SIDES]
    if any(abs(each - wide * area) <= 1.0 for area in areas):
        return wide
    fits = (*(each / area for area in areas[:4]), *((each - 1.0) / area for area in areas[1:4]))
    return min((one for one in fits if one > wide and abs(one - round(one)) < 1e-9), default=wide)


def _take_shortcuts(found: NDArray[np.float64], columns: Columns, dimensions: NDArray[np.int64]) -> None:
    """A convolution that does not fit to the layer before it takes the output of one of the last layers to which its
    weights fit: a shortcut, or another branch."""
    wide, given = columns.channels.tolist(), columns.outputs.tolist()
    weights, sides = columns.parameters.tolist(), dimensions.tolist()
    for place in np.flatnonzero(columns.kinds == INDEX["convolution"]).tolist():
        fits = _possible_channels(weights[place] / max(wide[place], 1), max(1, sides[place]))
        if not place or wide[place - 1] in fits:
            continue
        rows = given[place] / max(wide[place], 1)
        for near in range(place - 2, max(-1, place - 2 - NEAR), -1):
            if wide[near] in fits and given[near] / wide[near] >= rows:
                found[place] = given[near]
                break


@lru_cache(maxsize=4096)
def _possible_channels(each: float, dimensions: int) -> frozenset[float]:
    """Numbers of input channels that this many weights of one output may mean, with or without a bias."""
    shares = [(each - bias) / side**dimensions for side in _SIDES for bias in (0.0, 1.0)]
    return frozenset(float(round(one)) for one in shares if one >= 1.0 and abs(one - round(one)) < 1e-9)
