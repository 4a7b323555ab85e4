"""Layers as `gpumemnet.serving.model.merge` returns them, but without merging equal ones, to compare both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpumemnet.serving.model import ABSENT, Merged


def unmerged(kinds: NDArray[np.int64], tokens: NDArray[np.float32]) -> Merged:
    nothing = np.zeros_like(tokens[:1])
    around = np.concatenate([[ABSENT], kinds, [ABSENT]]).astype(np.int64)
    sizes = np.concatenate([nothing, tokens, nothing])
    near = [slice(begin, begin + len(kinds)) for begin in range(3)]
    return Merged(
        np.stack([around[each] for each in near], axis=1),
        np.stack([sizes[each] for each in near], axis=1),
        np.ones(len(kinds), np.float32),
    )
