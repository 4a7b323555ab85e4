"""Baselines before nets: trees on the same scalars, scale and rows.

ExtraTrees gives quantiles by the spread of its trees; gradient boosting learns one regressor for each quantile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpumemnet.training.ensemble import Separate, each_member
from gpumemnet.training.samples import QUANTILES, Numbers, Samples, Scale, Wholes

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
