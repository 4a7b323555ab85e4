"""Weights that two layers share: a language model's last layer is often its embedding once more.

A list gives each layer its weights; the total counts them once. What the total lacks is shared, where there are two of
the same size and one of them is an embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.columns import Columns
from carma.trial.layers.kinds import INDEX

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAY_SHARE = (INDEX["linear"], INDEX["embedding"])


def find_tied(columns: Columns, total: int | None) -> NDArray[np.int64]:
    """For each layer the place of the embedding whose weights it uses, else -1. A bias is its own in any case."""
    found = np.full(columns.count, -1, np.int64)
    lacks = 0.0 if total is None else float(columns.parameters.sum()) - total
    if lacks <= 0:
        return found
    owners: dict[float, int] = {}
    for place in np.flatnonzero(np.isin(columns.kinds, _MAY_SHARE)).tolist():
        has = float(columns.parameters[place])
        shared = next((size for size in (has, has - float(columns.channels[place])) if size in owners), 0.0)
        if 0 < shared <= lacks:
            found[place] = owners[shared]
            lacks -= shared
        elif columns.kinds[place] == INDEX["embedding"]:
            owners.setdefault(has, place)
    return found
