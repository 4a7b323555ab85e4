"""The layers column by column, and how much goes into each, which a summary seldom tells: the weights do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from carma.trial.layers.kinds import INDEX, KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray


def flags(*kinds: str) -> NDArray[np.bool_]:
    """For each kind whether it is one of these: indexed by kinds, it answers for each layer."""
    return np.array([kind in kinds for kind in KINDS])


_RESIZE = flags("convolution", "grouped", "transposed", "pooling", "max_pooling", "upsampling", "embedding")


@dataclass(frozen=True)
class Columns:
    kinds: NDArray[np.int64]
    outputs: NDArray[np.float64]  # elements, the batch included
    parameters: NDArray[np.float64]
    channels: NDArray[np.float64]
    inplace: NDArray[np.bool_]
    inputs: NDArray[np.float64]  # elements, as far as the weights tell
    names: NDArray[np.str_]  # as the framework has them

    @property
    def count(self) -> int:
        return len(self.kinds)


Of = TypeVar("Of", bound=np.generic)


def shifted(column: NDArray[Of], first: object) -> NDArray[Of]:
    """What each layer finds before it; `first` finds the first one."""
    found = np.empty_like(column)
    found[:1] = first
    found[1:] = column[:-1]
    return found


_NEAR = 14  # layers in which a shortcut begins and ends
_SIDES = (1.0, 3.0, 5.0, 7.0, 11.0, 2.0, 4.0)  # of kernels


def inputs_of(
    kinds: NDArray[np.int64],
    outputs: NDArray[np.float64],
    parameters: NDArray[np.float64],
    channels: NDArray[np.float64],
    dimensions: NDArray[np.int64],
    first: float,
) -> NDArray[np.float64]:
    """Elements that go into each layer. Most give as many as they take; products tell by their weights."""
    before = shifted(outputs, max(first, 1.0))
    wide = shifted(channels, 1.0)
    each = parameters / np.maximum(channels, 1.0)  # weights of one output, and perhaps a bias
    rows = outputs / np.maximum(channels, 1.0)
    linear = (kinds == INDEX["linear"]) & (parameters > 0)
    found = np.where(_RESIZE[kinds], before, outputs)
    taken = np.where(np.abs(each - wide) <= 1.0, wide, np.floor(each))
    found = np.where(linear, taken * rows, found)
    places = 1 + np.flatnonzero(kinds[1:] == INDEX["convolution"])
    came = wide[places]
    asked = zip(each[places].tolist(), came.tolist(), np.maximum(dimensions[places], 1).tolist(), strict=True)
    positions = np.maximum(before[places] / np.maximum(came, 1.0), rows[places])
    found[places] = np.array([_channels_in(*one) for one in asked]) * positions
    found = np.minimum(found, first + np.cumsum(before))  # what met in it was there before
    _from_before(found, kinds, outputs, parameters, channels, dimensions)
    return found


@lru_cache(maxsize=4096)
def _channels_in(each: float, wide: float, dimensions: int) -> float:
    """Of a convolution: as many as came, where a kernel's area fits to that; else the fewest that are whole."""
    areas = [side**dimensions for side in _SIDES]
    if any(abs(each - wide * area) <= 1.0 for area in areas):
        return wide
    fits = (*(each / area for area in areas[:4]), *((each - 1.0) / area for area in areas[1:4]))
    return min((one for one in fits if one > wide and abs(one - round(one)) < 1e-9), default=wide)


def _from_before(
    found: NDArray[np.float64],
    kinds: NDArray[np.int64],
    outputs: NDArray[np.float64],
    parameters: NDArray[np.float64],
    channels: NDArray[np.float64],
    dimensions: NDArray[np.int64],
) -> None:
    """A convolution that does not fit to the layer before it takes what one of the last layers gave, where its weights
    fit to that: a shortcut, or another branch."""
    places = np.flatnonzero(kinds == INDEX["convolution"]).tolist()
    wide, given, weights, spread = channels.tolist(), outputs.tolist(), parameters.tolist(), dimensions.tolist()
    for place in places:
        fits = _may_take(weights[place] / max(wide[place], 1), max(1, spread[place]))
        if not place or wide[place - 1] in fits:
            continue
        rows = given[place] / max(wide[place], 1)
        for near in range(place - 2, max(-1, place - 2 - _NEAR), -1):
            if wide[near] in fits and given[near] / wide[near] >= rows:
                found[place] = given[near]
                break


@lru_cache(maxsize=4096)
def _may_take(each: float, dimensions: int) -> frozenset[float]:
    """Whole numbers of channels that so many weights of one output may stand for, with a bias or without."""
    areas = [side**dimensions for side in _SIDES]
    shares = [(each - bias) / area for area in areas for bias in (0.0, 1.0)]
    return frozenset(float(round(one)) for one in shares if one >= 1.0 and abs(one - round(one)) < 1e-9)
