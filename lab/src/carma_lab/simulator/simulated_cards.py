"""Cards that can be simulated: memory and power.

Power is a curve over SM and DRAM activity. No power of an A100 with 80 GB was published; it gets the curve of the one
with 40 GB.
"""

from __future__ import annotations

import difflib
from math import exp

from carma.core.model.values import Capabilities, Demand, Gpu, GpuId, Record
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM
from carma.errors import Usage
from carma.trial.cards import find_card


class Curve(Record, frozen=True, kw_only=True):
    idle_w: float
    most_w: float
    of_sm: float
    of_dram: float
    sharpness: float | None = None

    def share(self, sm_active: float, dram_active: float) -> float:
        """Share of the power range above idle, 0 to 1."""
        load = self.of_sm * sm_active + self.of_dram * dram_active
        return min(1.0, load) if self.sharpness is None else 1.0 - exp(-(load**self.sharpness))

    def watts(self, sm_active: float, dram_active: float) -> float:
        return self.idle_w + (self.most_w - self.idle_w) * self.share(sm_active, dram_active)

    def share_of(self, watts: float) -> float:
        """The share of a measured power."""
        return min(1.0, max(0.0, (watts - self.idle_w) / (self.most_w - self.idle_w)))


# The A100s of a DGX Station, from 53 published means of tasks alone (lab/results/a100/solo.csv). The limit is 275 W,
# where the steadiest tasks settle (GPT-2: median 276 W). Idle is 52 W: in five profiles the most frequent value
# of the first 200 s is 51.9 to 53.4 W. The other three constants are least squares.
A100_40 = Curve(idle_w=52.0, most_w=275.0, of_sm=1.785, of_dram=0.097, sharpness=1.997)
# Weights of core/scheduling/sharing_model.py, measured on an H200 (lab/results/h200/sharing.json).
H200 = Curve(idle_w=76.0, most_w=700.0, of_sm=POWER_OF_SM, of_dram=POWER_OF_DRAM)


_METRICS = ("sm_active", "sm_occupancy", "dram_active", "gr_active")
_EVERYTHING = Capabilities(metrics=_METRICS, power=True, energy=True, processes=True, source="virtual")


class Card(Record, frozen=True, kw_only=True):
    name: str
    memory_mib: int  # usable by tasks
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
    "a100-40": Card(name="NVIDIA A100-SXM4-40GB", memory_mib=40_960, curve=A100_40),
    "a100-80": Card(name="NVIDIA A100-SXM4-80GB", memory_mib=81_920, curve=A100_40),
    "h200": Card(name="NVIDIA H200", memory_mib=143_771, curve=H200),
}


def find(name: str) -> Card:
    """The card with that short name, or any spelling that `carma estimate --gpu` accepts."""
    if name in CARDS:
        return CARDS[name]
    known = find_card(name)
    for card in CARDS.values():
        if known is not None and known.name == card.name:
            return card
    if known is not None:
        raise Usage(f"{name}: the card {known.name} cannot be simulated", f"Use one of {', '.join(CARDS)}.")
    near = difflib.get_close_matches(name.lower(), CARDS, n=1)
    nearest = f"Did you mean {near[0]}? " if near else ""
    raise Usage(f"{name}: no such card", f"{nearest}Simulated cards: {', '.join(CARDS)}.")


def gpu_of(card: Card, gpu: GpuId, index: int) -> Gpu:
    return Gpu(
        id=gpu,
        index=index,
        name=card.name,
        memory_mib=card.memory_mib,
        capabilities=_EVERYTHING,
        power_limit_w=card.most_w,
    )
