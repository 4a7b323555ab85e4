"""Which rows are learned from and which are judged: folds by chance, or one shape of networks at a time.

Folds by chance are the published way. Leaving out a whole shape shows what an estimator does with networks of a make
that it has never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpumemnet.training.samples import Wholes

Protocol = Literal["folds", "shapes"]
FOLDS = 3  # as published
FEWEST = 30  # rows of a shape that are worth a judgement


@dataclass(frozen=True)
class Split:
    name: str  # "fold 1", or the shape that is left out
    learned: Wholes
    judged: Wholes


def by_chance(rows: int, seed: int, folds: int = FOLDS) -> list[Split]:
    fold = np.random.default_rng(seed).permutation(rows) % folds
    return [Split(f"fold {k + 1}", np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def by_shape(shapes: Sequence[str]) -> list[Split]:
    """Shapes with few rows are never left out: a share of a handful says nothing."""
    named = np.array(shapes)
    splits = [Split(one, np.flatnonzero(named != one), np.flatnonzero(named == one)) for one in sorted(set(shapes))]
    return [split for split in splits if len(split.judged) >= FEWEST and len(split.learned) >= FEWEST]
