"""What every learner has in common: members that leave out a part of the rows each, and what follows from that.

The rows that a member has not seen tell how far its quantiles are off, which operating point costs least, and what
factor makes a bound hold. All of it comes from the rows that were given for learning; no other row is ever looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from carma.estimate.gpumemnet.facts import GB_MIB
from carma.train.samples import Numbers, Samples, Wholes
from carma.train.scale import QUANTILES, Scale

LEVELS = (0.9, 0.95, 0.99)  # for which a bound is kept
UNDER_COSTS = 10.0  # times what an over-estimate costs: a task that dies against room that stays empty
UNDER_MOST = 0.008  # of the rows, at any class width: the operating point is the most accurate one within that
POINTS = tuple(round(float(point), 3) for point in np.arange(0.5, 0.9901, 0.01))


class Members(Protocol):
    def z(self, samples: Samples) -> Numbers:
        """[members, rows, quantiles], on the scale that is learned on."""
        ...


# From samples, their z, the rows of each member and a seed.
Fit = Callable[[Samples, Numbers, Sequence[Wholes], Scale, int], Members]


@dataclass(frozen=True)
class Learned:
    members: Members
    scale: Scale
    shifts: Numbers  # of each quantile, so that as many unseen rows lie below it as should
    operating_point: float
    careful_point: float  # where an under-estimate costs ten over-estimates
    factors: Mapping[float, float]  # by level: its quantile times that is the bound
    unseen_mib: Numbers  # of every row that was learned from, by the member that had left it out

    def quantiles_mib(self, samples: Samples) -> Numbers:
        return self.scale.to_mib(shifted(self.members.z(samples).mean(0), self.shifts), samples)

    def at(self, samples: Samples, point: float | None = None) -> Numbers:
        return at_level(self.quantiles_mib(samples), self.operating_point if point is None else point)


def learn(fit: Fit, samples: Samples, members: int, seed: int, widths_gb: Sequence[int]) -> Learned:
    scale = Scale.of(samples)
    part = np.random.default_rng(seed).permutation(len(samples)) % members
    fitted = fit(samples, scale.to_z(samples), [np.flatnonzero(part != one) for one in range(members)], scale, seed)
    every = fitted.z(samples)
    unseen = every[part, np.arange(len(samples))]
    shifts = _shifts(unseen, scale.to_z(samples))
    mib = scale.to_mib(shifted(unseen, shifts), samples)
    return Learned(
        members=fitted,
        scale=scale,
        shifts=shifts,
        operating_point=most_accurate(mib, samples.footprint_mib, widths_gb),
        careful_point=cheapest(mib, samples.footprint_mib, widths_gb),
        factors={level: conformal(at_level(mib, level), samples.footprint_mib, level) for level in LEVELS},
        unseen_mib=mib,
    )


def shifted(z: Numbers, shifts: Numbers) -> Numbers:
    moved: Numbers = np.maximum.accumulate(z + shifts, axis=-1)
    return moved


def _shifts(unseen: Numbers, truth: Numbers) -> Numbers:
    """Conformal: the level's quantile of by how much each quantile was missed."""
    return np.array([np.quantile(truth - unseen[:, place], level) for place, level in enumerate(QUANTILES)])


def at_level(mib: Numbers, level: float) -> Numbers:
    """Between two quantiles along a straight line."""
    place = int(np.clip(np.searchsorted(QUANTILES, level) - 1, 0, len(QUANTILES) - 2))
    low, high = QUANTILES[place], QUANTILES[place + 1]
    share = min(max((level - low) / (high - low), 0.0), 1.0)
    between: Numbers = mib[:, place] * (1 - share) + mib[:, place + 1] * share
    return between


def most_accurate(mib: Numbers, truth_mib: Numbers, widths_gb: Sequence[int]) -> float:
    """The operating point with most classes right among those with few under-estimates; the highest where none is."""

    def worth(point: float) -> tuple[bool, float]:
        off = _off(at_level(mib, point), truth_mib, widths_gb)
        few = all((one < 0).mean() <= UNDER_MOST for one in off)
        return few, float(sum((one == 0).mean() for one in off)) if few else point

    return max(POINTS, key=worth)


def cheapest(mib: Numbers, truth_mib: Numbers, widths_gb: Sequence[int]) -> float:
    """The point with the least cost over all class widths; of equal ones the lowest."""

    def cost(point: float) -> float:
        off = _off(at_level(mib, point), truth_mib, widths_gb)
        return float(sum(UNDER_COSTS * (one < 0).mean() + (one > 0).mean() for one in off))

    return min(POINTS, key=cost)


def _off(found_mib: Numbers, truth_mib: Numbers, widths_gb: Sequence[int]) -> list[Numbers]:
    """By how many classes, for each width."""
    return [found_mib // (width * GB_MIB) - truth_mib // (width * GB_MIB) for width in widths_gb]


def conformal(found_mib: Numbers, truth_mib: Numbers, level: float) -> float:
    """The factor that makes it hold: of the sorted ratios the (n + 1) · level-th, the last where there are too few."""
    ratios = np.sort(truth_mib / found_mib)
    rank = min(int(np.ceil((len(ratios) + 1) * level)), len(ratios))
    return float(ratios[rank - 1])
