"""Which layers are computed again in the backward pass, where checkpointing is on: a list of layers does not tell.

Scripts checkpoint the blocks that a network is made of, and these repeat themselves. Stems, heads and what stands
between stages are kept as ever.
"""

from __future__ import annotations

from carma.trial.layers.columns import Columns
from carma.trial.layers.kinds import INDEX

_LONGEST = 48  # layers of a block
_CONVOLUTIONS = tuple(INDEX[kind] for kind in ("convolution", "grouped", "transposed"))
_NORMS = (INDEX["norm"], INDEX["batch_norm"])
_BEGINS = (*_CONVOLUTIONS, *_NORMS, INDEX["linear"], INDEX["attention"])

Span = tuple[int, int, bool]  # where it begins and ends, and whether it is computed again


def spans_of(columns: Columns) -> list[Span]:
    """Layers that are alike in kind and sizes, and come at least twice in the same order, are blocks."""
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
    """Of the shortest part that comes at least twice from here on; 0 where there is none, or where no block begins."""
    follows = place and kinds[place] in _NORMS and kinds[place - 1] in _CONVOLUTIONS
    if kinds[place] not in _BEGINS or follows:
        return 0
    for period in range(2, min(_LONGEST, (len(numbers) - place) // 2) + 1):
        end = place + period
        if numbers[place] == numbers[end] and numbers[place:end] == numbers[end : end + period]:
            return period
    return 0
