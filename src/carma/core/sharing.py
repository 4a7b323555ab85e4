"""How fast tasks progress when they share a GPU, and what the GPU then shows. Pure arithmetic, no state.

A task alone runs at rate 1. With neighbours, task i is slowed by

    S_i ** p = 1 + sum over resources r of  weight_r * (total_r ** p - own_ir ** p)  + crowding

where own_ir is the share of resource r (SM activity, SM occupancy, DRAM activity) that the task keeps busy alone, as a
part of what the resource can give in practice, and total_r is the sum over the tasks. With p = 1.3 there is contention
well below saturation, and the excess over saturation is shared out above it; `crowding` is what groups of three and
more lose beyond that. No task is slower than if the tasks took turns. What follows:

- alone: S = 1; a neighbour never makes a task faster; a task's rate lies in (0, 1]; total progress is at least 1;
- a small task beside a heavy one loses more than the heavy one does.

The constants are a prior, set by hand so that the rows below come near published figures, on the slow side where those
scatter. They are not fitted yet on the tables in results/h200, whose 25 lighter tasks share better (medians of 1.80,
2.21 and 1.98 in total for pairs, triples and quadruples under MPS). "Total" is the sum of rates. The demands in
brackets are typical values, only partly published (the average is AEGIS's mean over mixed tasks); "H200" is an earlier
measurement of ten tasks:

| case (SM activity, occupancy, DRAM)        | here        | published                                                 |
|--------------------------------------------|-------------|-----------------------------------------------------------|
| two small tasks (.125, .03, .04), total    | 1.90        | nearly no slowdown (published pairs of small tasks)       |
| four, eight of them, total                 | 3.1, 4.2    | 4.2, 7.4 (H200, ResNet-18/CIFAR under MPS)                |
| two average tasks (.42, .19, .26), total   | 1.52        | 1.5 (H200, median of mixed pairs under MPS)               |
| the SM activity that they show             | .64         | .64 (AEGIS, two to three tasks on an A100; alone .42)     |
| two or three of them, slowdown             | 1.32, 1.90  | 1.55 with the utilisation gate, 1.82 without (AEGIS)      |
| three, four of them, total                 | 1.58, 1.57  | 1.48, 1.62 (H200, medians of mixed groups)                |
| two heavy tasks (.9, .4, .5), total        | 1.12        | 1.13 to 1.18 (large pairs, A100 and H200)                 |
| a small one beside one heavy one, slowdown | 1.6         | worst-off of a pair: 1.5 to 2.3 (H200, under MPS)         |
| beside two, three heavy ones, slowdown     | 2.7, 4.0    | worst-off: 3.1, 4.1 (H200, medians)                       |

It describes sharing under MPS: plain time-slicing can lose outright (0.91 in total for a large pair on the H200),
which this form cannot show.

Sources: the AEGIS evaluation of the CARMA policies (A100), the EuroMLSys 2024 collocation study (A100), an
H200 under MPS. Published pairs scatter by 0.07 in the mean and 0.21 at the 95th percentile around such models: read
a rate as a middle, not as a promise.
"""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model import Demand

# weight, and the reading at which the resource is full in practice (occupancy and DRAM activity never reach 1).
_SM, _SM_FULL = 0.6, 1.0
_OCCUPANCY, _OCCUPANCY_FULL = 0.2, 0.6
_DRAM, _DRAM_FULL = 0.2, 0.7
_POWER = 1.3
_CROWD = 0.8


def progress_rates(demands: Sequence[Demand]) -> tuple[float, ...]:
    """Each task's speed relative to running alone, in (0, 1], for tasks that share one GPU."""
    if len(demands) < 2:
        return (1.0,) * len(demands)
    shares = [_shares(demand) for demand in demands]
    sm, occupancy, dram = (sum(column) ** _POWER for column in zip(*shares, strict=True))
    total = _SM * sm + _OCCUPANCY * occupancy + _DRAM * dram + _crowding([share[0] for share in shares])
    fair = 1.0 / len(demands)  # taking turns would give as much
    return tuple(min(1.0, max(fair, (1.0 + total - _own(share)) ** (-1.0 / _POWER))) for share in shares)


def _crowding(sm_shares: Sequence[float]) -> float:
    """What three and more lose beyond what pairs lose, where they ask for much in sum."""
    return float(_CROWD * (1.0 - 2.0 / len(sm_shares)) * sum(sm_shares) ** 1.5)


def activity(demands: Sequence[Demand]) -> Demand:
    """What the GPU shows while those tasks share it."""
    return shown(demands, progress_rates(demands))


def shown(demands: Sequence[Demand], rates: Sequence[float]) -> Demand:
    """What a GPU shows when those tasks run at those rates: a slowed task keeps it busy in proportion.

    AEGIS saw SM activity grow by 40 % while work was done 37 % faster: in proportion, within the noise.
    """
    sm = occupancy = dram = 0.0
    for demand, rate in zip(demands, rates, strict=True):
        sm += demand.sm_active * rate
        occupancy += demand.sm_occupancy * rate
        dram += demand.dram_active * rate
    return Demand(sm_active=min(1.0, sm), sm_occupancy=min(1.0, occupancy), dram_active=min(1.0, dram))


def _shares(demand: Demand) -> tuple[float, float, float]:
    return (
        _part(demand.sm_active / _SM_FULL),
        _part(demand.sm_occupancy / _OCCUPANCY_FULL),
        _part(demand.dram_active / _DRAM_FULL),
    )


def _own(share: tuple[float, float, float]) -> float:
    sm, occupancy, dram = share
    return float(_SM * sm**_POWER + _OCCUPANCY * occupancy**_POWER + _DRAM * dram**_POWER)


def _part(value: float) -> float:
    """Into 0..1; what is unknown (NaN) counts as the worst case."""
    return min(1.0, max(0.0, value)) if value == value else 1.0
