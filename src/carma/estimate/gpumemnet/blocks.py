"""Which layers are computed again under gradient checkpointing: the blocks that a network repeats.

People wrap the blocks of a network, and blocks follow one another: the same layers with the same weights. Where nothing
repeats, a block is taken to go from one norm to the next but one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from carma.estimate.gpumemnet.kinds import INDEX

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NORMS = (INDEX["norm"], INDEX["batch_norm"])
_NORMS_IN_BLOCK = 2
_LONGEST = 64  # layers of a block
_LEAST = 3

Segment = tuple[int, int, bool]  # from, to, whether it is computed again


def find_blocks(kinds: NDArray[np.int64], parameters: NDArray[np.float64]) -> list[Segment]:
    """All layers, in order."""
    marks = list(zip(kinds.tolist(), parameters.tolist(), strict=True))
    found: list[Segment] = []
    place = begin = 0
    while place < len(marks):
        period, times = _repeats(marks, place)
        if times < 2:
            place += 1
            continue
        if begin < place:
            found.append((begin, place, False))
        found += [(place + each * period, place + (each + 1) * period, True) for each in range(times)]
        place = begin = place + times * period
    if not found:
        return _between_norms(kinds)
    return found + [(begin, len(marks), False)] * (begin < len(marks))


def _repeats(marks: list[tuple[int, float]], begin: int) -> tuple[int, int]:
    """The period and how often it comes, of what covers most."""
    best = (0, 0)
    for period in range(_LEAST, min(_LONGEST, (len(marks) - begin) // 2) + 1):
        first, times, place = marks[begin : begin + period], 1, begin + period
        while marks[place : place + period] == first:
            times += 1
            place += period
        if times > 1 and times * period > best[0] * best[1]:
            best = (period, times)
    return best


def _between_norms(kinds: NDArray[np.int64]) -> list[Segment]:
    norms = np.flatnonzero(np.isin(kinds, _NORMS))
    begins = [0, *norms[_NORMS_IN_BLOCK::_NORMS_IN_BLOCK].tolist(), len(kinds)]
    return [(begin, end, True) for begin, end in pairwise(begins)]
