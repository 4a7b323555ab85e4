"""Weights that two layers share: a language model's last layer is often its embedding once more.

A list gives each layer its weights; the total counts them once. What the total lacks is shared, where there are two of
the same size and one of them is an embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from carma.estimate.gpumemnet.kinds import INDEX

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAY_SHARE = (INDEX["linear"], INDEX["embedding"])


def find_tied(kinds: NDArray[np.int64], weights: NDArray[np.float64], lacks: float) -> NDArray[np.int64]:
    """For each layer the place of the embedding whose weights it uses, else -1. `weights`: elements, without biases."""
    found = np.full(len(kinds), -1, np.int64)
    owners: dict[float, int] = {}
    for place in np.flatnonzero(np.isin(kinds, _MAY_SHARE)).tolist():
        size = float(weights[place])
        if size in owners and 0 < size <= lacks:
            found[place] = owners[size]
            lacks -= size
        elif kinds[place] == INDEX["embedding"]:
            owners.setdefault(size, place)
    return found
