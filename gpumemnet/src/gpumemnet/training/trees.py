"""Baselines before nets: trees on the same scalars, scale and rows.

ExtraTrees gives quantiles by the spread of its trees; gradient boosting learns one regressor for each quantile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpumemnet.training.samples import QUANTILES, Numbers, Samples, Scale, Wholes

Regressor = Any  # scikit-learn has no types


@dataclass(frozen=True)
class Forests:
    forests: Sequence[Regressor]

    def z(self, samples: Samples) -> Numbers:
        found = []
        for forest in self.forests:
            trees = np.stack([tree.predict(samples.scalars) for tree in forest.estimators_])
            found.append(np.quantile(trees, QUANTILES, axis=0).T)
        return np.stack(found)


@dataclass(frozen=True)
class Boosted:
    by_quantile: Sequence[Sequence[Regressor]]

    def z(self, samples: Samples) -> Numbers:
        """Independent regressors may cross, so their answers are sorted."""
        found = [np.stack([one.predict(samples.scalars) for one in member], 1) for member in self.by_quantile]
        return np.sort(np.stack(found), axis=-1)


def fit_forests(samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, seed: int) -> Forests:
    from sklearn.ensemble import ExtraTreesRegressor

    def grow(rows: Wholes, member: int) -> Regressor:
        forest = ExtraTreesRegressor(100, min_samples_leaf=2, max_features=0.5, random_state=seed * 1000 + member)
        return forest.fit(samples.scalars[rows], z[rows])

    return Forests(_each(rows_of, grow))


def fit_boosted(samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, seed: int) -> Boosted:
    from sklearn.ensemble import HistGradientBoostingRegressor

    def boost(rows: Wholes, member: int) -> Sequence[Regressor]:
        return [
            HistGradientBoostingRegressor(
                loss="quantile", quantile=level, max_iter=250, learning_rate=0.08, random_state=seed * 1000 + member
            ).fit(samples.scalars[rows], z[rows])
            for level in QUANTILES
        ]

    return Boosted(_each(rows_of, boost))


def _each(rows_of: Sequence[Wholes], make: Callable[[Wholes, int], Any]) -> list[Any]:
    return [make(rows, member) for member, rows in enumerate(rows_of)]
