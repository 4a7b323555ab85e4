"""A demand from a description, for a task that never ran: what it would keep busy alone on that card.

What is told is the expected figure, not a cautious one: docs/goodput.md has what caution would cost. A loader that
holds the GPU up is not in it: such a task shows less, which is the safe side. Nothing is told where the description
does not carry it: recurrent layers, several networks, kinds of layers that nobody knows, cards without rates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from carma.core.model.values import Demand
from carma.trial.demand.card_rates import rates_of
from carma.trial.demand.kernel_work import work_of
from carma.trial.demand.roofline import FIGURES, Constants, batch_of, shown
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described, bytes_each

CONSTANTS = Path(__file__).with_name("constants.json")
LEAST_KNOWN = 0.8  # of weights and of outputs, what layers of known kinds must have


@cache
def constants() -> Constants:
    return msgspec.json.decode(CONSTANTS.read_bytes(), type=Constants)


def demand_of(described: Described, gpu: str, *, tf32: bool = False) -> Demand | None:
    """None where nothing can be told. Each figure with two digits: more would be a lie."""
    card = rates_of(gpu)
    if card is None or described.passes > 1 or bytes_each(described.dtype) not in (2, 4):
        return None
    try:
        work = work_of(described, tf32=tf32)
    except CannotTell:
        return None
    if work.known < LEAST_KNOWN:
        return None
    found = shown(batch_of([work]), constants(), card)
    return Demand(**{name: round(float(found[name][0]), 2) for name in FIGURES})
