"""A model's layers for the Transformer-based model: each with its two neighbours, equal ones once.

Networks repeat layers: of 160 layers of a decoder about 16 differ in themselves or their neighbours. The model knows
positions by neighbours only, so n equal layers are one layer of weight n: attention over the few equals attention over
all, in a tenth of the time. Learning and serving share this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.kinds import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABSENT = len(KINDS)  # the kind before the first layer and after the last
NEAR = 3  # before, itself, after


@dataclass(frozen=True)
class Merged:
    """The distinct layers. `tokens` of an absent neighbour are 0."""

    kinds: NDArray[np.int64]  # [layers, NEAR]
    tokens: NDArray[np.float32]  # [layers, NEAR, T]
    weights: NDArray[np.float32]  # number of each


def merge(kinds: NDArray[np.int64], tokens: NDArray[np.float32]) -> Merged:
    """Uses bytes in a dictionary: numpy's `unique` takes ten times as long for rows of floats."""
    rows = np.concatenate([kinds[:, None].astype(np.float32), tokens], axis=1)
    raw, size = rows.tobytes(), rows.shape[1] * rows.itemsize
    seen: dict[bytes, int] = {}
    numbers = [seen.setdefault(raw[begin : begin + size], len(seen) + 1) for begin in range(0, len(raw), size)]
    around = np.array([0, *numbers, 0], np.int64)
    count = len(seen) + 1
    near = (around[:-2] * count + around[1:-1]) * count + around[2:]
    _, first, weights = np.unique(near, return_index=True, return_counts=True)
    return _around(kinds, tokens, first, weights.astype(np.float32))


def _around(
    kinds: NDArray[np.int64], tokens: NDArray[np.float32], places: NDArray[np.int64], weights: NDArray[np.float32]
) -> Merged:
    padded = np.pad(kinds, 1, constant_values=ABSENT)
    sizes = np.pad(tokens, ((1, 1), (0, 0)))
    near = places[:, None] + np.arange(NEAR)
    return Merged(padded[near], sizes[near], weights)
