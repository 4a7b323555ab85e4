"""Cards that can be simulated: memory, and what they draw.

Power is a curve over SM and DRAM activity (power.py says where each one is from). Of an A100 with 80 GB nothing was
published: it is taken to draw what one with 40 GB does.
"""

from __future__ import annotations

import difflib

from carma.core.model.values import Capabilities, Demand, Gpu, GpuId, Record
from carma.errors import Usage
from carma.trial.cards import find_card
from carma_lab.simulator import power
from carma_lab.simulator.power import Curve

_EVERYTHING = Capabilities(
    metrics=("sm_active", "sm_occupancy", "dram_active", "gr_active"),
    power=True,
    energy=True,
    processes=True,
    source="virtual",
)


class Card(Record, frozen=True, kw_only=True):
    name: str
    memory_mib: int  # what tasks can use
    curve: Curve

    @property
    def idle_w(self) -> float:
        return self.curve.idle_w

    @property
    def most_w(self) -> float:
        return self.curve.most_w

    def power_w(self, load: Demand) -> float:
        return self.curve.watts(load.sm_active, load.dram_active)


CARDS = {
    "a100-40": Card(name="NVIDIA A100-SXM4-40GB", memory_mib=40_960, curve=power.A100_40),
    "a100-80": Card(name="NVIDIA A100-SXM4-80GB", memory_mib=81_920, curve=power.A100_40),
    "h200": Card(name="NVIDIA H200", memory_mib=143_771, curve=power.H200),
}


def find(name: str) -> Card:
    """By its short name, or by any spelling that `carma estimate --gpu` takes."""
    if name in CARDS:
        return CARDS[name]
    known = find_card(name)
    for card in CARDS.values():
        if known is not None and known.name == card.name:
            return card
    if known is not None:
        raise Usage(f"{name}: a card of the kind {known.name} cannot be simulated", f"These can: {', '.join(CARDS)}.")
    near = difflib.get_close_matches(name.lower(), CARDS, n=1)
    nearest = f"Did you mean {near[0]}? " if near else ""
    raise Usage(f"{name}: no such card", f"{nearest}These can be simulated: {', '.join(CARDS)}.")


def server(card: Card, count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            id=GpuId(f"GPU-{index:04}"),
            index=index,
            name=card.name,
            memory_mib=card.memory_mib,
            capabilities=_EVERYTHING,
        )
        for index in range(count)
    )
