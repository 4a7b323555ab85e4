"""Structure that a list of layers shows only by its sizes: repeated blocks, and weights that two layers share.

1. `spans_of`: the layers that gradient checkpointing recomputes. Scripts checkpoint the repeated blocks of a network;
   stems, heads and layers between stages are kept.
2. `find_tied`: a language model's last layer often uses the weights of its embedding. The list gives each layer its
   weights, the total counts them once. The difference is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.columns import Columns
from carma.trial.layers.kinds import INDEX

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAY_SHARE = (INDEX["linear"], INDEX["embedding"])
_LONGEST = 48  # layers of a block
_CONVOLUTIONS = tuple(INDEX[kind] for kind in ("convolution", "grouped", "transposed"))
_NORMS = (INDEX["norm"], INDEX["batch_norm"])
_BEGINS = (*_CONVOLUTIONS, *_NORMS, INDEX["linear"], INDEX["attention"])

Span = tuple[int, int, bool]  # where it begins and ends, and whether it is recomputed


def spans_of(columns: Columns) -> list[Span]:
    """Blocks are layers of equal kinds and sizes that come at least twice in the same order."""
    sizes = zip(columns.kinds, columns.inputs, columns.outputs, columns.parameters, strict=True)
    known: dict[tuple[float, ...], int] = {}
    numbers = [known.setdefault(each, len(known)) for each in sizes]
    kinds: list[int] = columns.kinds.tolist()
    found: list[Span] = []
    place = loose = 0
    while place < len(numbers):
        period = _period(numbers, kinds, place)
        if not period:
            place += 1
            continue
        if loose < place:
            found.append((loose, place, False))
        part = numbers[place : place + period]
        while numbers[place : place + period] == part:
            found.append((place, place + period, True))
            place += period
        loose = place
    return [*found, (loose, len(numbers), False)] if loose < len(numbers) else found


def _period(numbers: list[int], kinds: list[int], place: int) -> int:
    """Length of the shortest part that comes at least twice from here on; 0 if there is none, or no block begins."""
    follows = place and kinds[place] in _NORMS and kinds[place - 1] in _CONVOLUTIONS
    if kinds[place] not in _BEGINS or follows:
        return 0
    for period in range(2, min(_LONGEST, (len(numbers) - place) // 2) + 1):
        end = place + period
        if numbers[place] == numbers[end] and numbers[place:end] == numbers[end : end + period]:
            return period
    return 0


def find_tied(columns: Columns, total: int | None) -> NDArray[np.int64]:
    """Places of the embeddings whose weights the layers use; -1 for other layers. A bias is never shared."""
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
