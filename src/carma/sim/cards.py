"""Cards that can be simulated: memory, and what they draw.

Power is a curve over activity: DRAM traffic weighs three times as much as SM activity, with a falling slope. It was
fitted on the six published means of an A100 40 GB (facts of the AEGIS evaluation: SM .42 and DRAM .26 at 218 W, .64 and
.38 at 263 W, .77 and .34 at 253 W, …), which it meets within 14 W.
"""

from __future__ import annotations

from carma.core.model import Capabilities, Demand, Gpu, GpuId, Record
from carma.errors import Usage

_EVERYTHING = Capabilities(
    sm_active=True,
    sm_occupancy=True,
    dram_active=True,
    gr_active=True,
    power=True,
    energy=True,
    processes=True,
    source="virtual",
)


class Card(Record, frozen=True, kw_only=True):
    name: str
    memory_mib: int  # what tasks can use
    idle_w: float
    most_w: float

    def power_w(self, load: Demand) -> float:
        busy = min(1.0, 0.25 * load.sm_active + 0.75 * load.dram_active)
        return self.idle_w + (self.most_w - self.idle_w) * float(busy**0.63)


CARDS = {
    "a100-40": Card(name="NVIDIA A100-SXM4-40GB", memory_mib=40_960, idle_w=55.0, most_w=400.0),
    "a100-80": Card(name="NVIDIA A100-SXM4-80GB", memory_mib=81_920, idle_w=60.0, most_w=400.0),
    "h200": Card(name="NVIDIA H200", memory_mib=143_771, idle_w=76.0, most_w=700.0),
}


def find(name: str) -> Card:
    if name not in CARDS:
        raise Usage(f"{name}: no such card", f"These can be simulated: {', '.join(CARDS)}.")
    return CARDS[name]


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
