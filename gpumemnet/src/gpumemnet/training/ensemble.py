"""Common to all learners: members that each leave out a part of the rows, and what follows from that.

The rows that a member has not seen show the error of its quantiles, whether the plain arithmetic is the better median,
which operating point costs least, and which factor makes a bound hold. Only rows for learning are used. The learners
that are trees are here too, because they need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpumemnet.serving.model_facts import GB_MIB
from gpumemnet.training.samples import MEDIAN, QUANTILES, Numbers, Samples, Scale, Wholes

LEVELS = (0.9, 0.95, 0.99)  # levels of the bounds
UNDER_COSTS = 10.0  # times an over-estimate: a failed task against unused memory
UNDER_ALLOWED = 0.008  # share of the rows, at the operating point
# The arithmetic is the median if it lies between these quantiles.
PLAIN_RANGE = (QUANTILES.index(0.05), QUANTILES.index(0.95))
PLAIN_MIB = 1500.0  # errors below it show the footprint without tensors
POINTS = tuple(round(float(point), 3) for point in np.arange(0.5, 0.9901, 0.01))


class Members(Protocol):
    def z(self, samples: Samples) -> Numbers:
        """[members, rows, quantiles], on the scale that is learned on."""
        ...


@dataclass(frozen=True)
class Separate:
    """Members that are models of their own."""

    models: Sequence[Any]
    ask: Callable[[Any, Samples], Numbers]  # z of one model: [rows, quantiles]

    def z(self, samples: Samples) -> Numbers:
        return np.stack([self.ask(model, samples) for model in self.models])


def each_member(make: Callable[[Wholes, int], Any], rows_of: Sequence[Wholes], seed: int) -> list[Any]:
    """A model for each member from its rows, with a seed of its own."""
    return [make(rows, seed * 1000 + member) for member, rows in enumerate(rows_of)]


# From samples, their z, the rows of each member and a seed.
Fit = Callable[[Samples, Numbers, Sequence[Wholes], Scale, int], Members]


@dataclass(frozen=True)
class Learned:
    members: Members
    scale: Scale
    shifts: Numbers  # of each quantile, so that it covers its share of unseen rows
    operating_point: float
    careful_point: float  # the point if every under-estimate costs ten over-estimates
    context_mib: float | None  # added to the arithmetic if that is the better median, else None
    factors: Mapping[float, float]  # by level: the factor of its quantile
    unseen_mib: Numbers  # of every row, by the member that left it out

    def quantiles_mib(self, samples: Samples) -> Numbers:
        mib = self.scale.to_mib(shifted(self.members.z(samples).mean(0), self.shifts), samples)
        return mib if self.context_mib is None else with_arithmetic(mib, samples.guess_mib + self.context_mib)


def learn(fit: Fit, samples: Samples, members: int, seed: int, width_gb: int) -> Learned:
    scale = Scale.of(samples)
    part = np.random.default_rng(seed).permutation(len(samples)) % members
    fitted = fit(samples, scale.to_z(samples), [np.flatnonzero(part != one) for one in range(members)], scale, seed)
    every = fitted.z(samples)
    unseen = every[part, np.arange(len(samples))]
    shifts = _shifts(unseen, scale.to_z(samples))
    mib = scale.to_mib(shifted(unseen, shifts), samples)
    context_mib = _context_mib(mib, samples, width_gb)
    mib = mib if context_mib is None else with_arithmetic(mib, samples.guess_mib + context_mib)
    return Learned(
        members=fitted,
        scale=scale,
        shifts=shifts,
        operating_point=cheapest(mib, samples.footprint_mib, width_gb, UNDER_ALLOWED),
        careful_point=cheapest(mib, samples.footprint_mib, width_gb, 0.0),
        context_mib=context_mib,
        factors={level: conformal(at_level(mib, level), samples.footprint_mib, level) for level in LEVELS},
        unseen_mib=mib,
    )


def shifted(z: Numbers, shifts: Numbers) -> Numbers:
    moved: Numbers = np.maximum.accumulate(z + shifts, axis=-1)
    return moved


def with_arithmetic(mib: Numbers, plain_mib: Numbers) -> Numbers:
    """The quantiles with the arithmetic as their median if it lies between the outer ones, because it is often
    exact."""
    low, high = PLAIN_RANGE
    allowed = (plain_mib >= mib[:, low]) & (plain_mib <= mib[:, high])
    middle = np.where(allowed, plain_mib, mib[:, MEDIAN])[:, None]
    below, above = mib[:, :MEDIAN], mib[:, MEDIAN + 1 :]
    return np.hstack([np.minimum(below, middle), middle, np.maximum(above, middle)])


def _context_mib(unseen_mib: Numbers, samples: Samples, width_gb: int) -> float | None:
    off = samples.footprint_mib - samples.guess_mib
    near = off[np.abs(off) < PLAIN_MIB]
    if not len(near):
        return None
    context_mib = float(np.median(near))
    width_mib = width_gb * GB_MIB

    def right(mib: Numbers) -> float:
        return float((mib[:, MEDIAN] // width_mib == samples.footprint_mib // width_mib).mean())

    helped = right(with_arithmetic(unseen_mib, samples.guess_mib + context_mib)) > right(unseen_mib)
    return context_mib if helped else None


def _shifts(unseen: Numbers, truth: Numbers) -> Numbers:
    """Conformal: for each quantile, the level's quantile of its errors."""
    return np.array([np.quantile(truth - unseen[:, place], level) for place, level in enumerate(QUANTILES)])


def at_level(mib: Numbers, level: float) -> Numbers:
    """Linear interpolation between two quantiles."""
    place = int(np.clip(np.searchsorted(QUANTILES, level) - 1, 0, len(QUANTILES) - 2))
    low, high = QUANTILES[place], QUANTILES[place + 1]
    share = min(max((level - low) / (high - low), 0.0), 1.0)
    between: Numbers = mib[:, place] * (1 - share) + mib[:, place + 1] * share
    return between


def cheapest(mib: Numbers, truth_mib: Numbers, width_gb: int, allowed: float) -> float:
    """The cheapest point at a class width; of equal ones the lowest. Up to `allowed`, an under-estimate costs as much
    as an over-estimate; beyond, ten times as much."""

    def cost(point: float) -> float:
        off = at_level(mib, point) // (width_gb * GB_MIB) - truth_mib // (width_gb * GB_MIB)
        under, over = float((off < 0).mean()), float((off > 0).mean())
        return over + under + (UNDER_COSTS - 1) * max(0.0, under - allowed)

    return min(POINTS, key=cost)


def conformal(found_mib: Numbers, truth_mib: Numbers, level: float) -> float:
    """The factor that makes the bound hold: of the sorted ratios the (n + 1) · level-th, or the last if there are too
    few."""
    ratios = np.sort(truth_mib / found_mib)
    rank = min(int(np.ceil((len(ratios) + 1) * level)), len(ratios))
    return float(ratios[rank - 1])


# Baselines before nets: trees on the same scalars, scale and rows. ExtraTrees gives quantiles by the spread of its
# trees; gradient boosting learns one regressor for each quantile.
Regressor = Any  # scikit-learn has no types


def fit_forests(samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, seed: int) -> Separate:
    from sklearn.ensemble import ExtraTreesRegressor

    def grow(rows: Wholes, own_seed: int) -> Regressor:
        forest = ExtraTreesRegressor(100, min_samples_leaf=2, max_features=0.5, random_state=own_seed)
        return forest.fit(samples.scalars[rows], z[rows])

    return Separate(each_member(grow, rows_of, seed), _spread)


def _spread(forest: Regressor, samples: Samples) -> Numbers:
    found: Numbers = np.quantile([tree.predict(samples.scalars) for tree in forest.estimators_], QUANTILES, axis=0).T
    return found


def fit_boosted(samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, seed: int) -> Separate:
    from sklearn.ensemble import HistGradientBoostingRegressor

    def boost(rows: Wholes, own_seed: int) -> Sequence[Regressor]:
        return [
            HistGradientBoostingRegressor(
                loss="quantile", quantile=level, max_iter=250, learning_rate=0.08, random_state=own_seed
            ).fit(samples.scalars[rows], z[rows])
            for level in QUANTILES
        ]

    return Separate(each_member(boost, rows_of, seed), _sorted)


def _sorted(by_quantile: Sequence[Regressor], samples: Samples) -> Numbers:
    """Independent regressors may cross, so their answers are sorted."""
    return np.sort(np.stack([one.predict(samples.scalars) for one in by_quantile], 1), axis=-1)
