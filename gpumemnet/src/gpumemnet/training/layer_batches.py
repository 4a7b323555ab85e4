"""The layers of many models as tensors: packed one after the other, cut into batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpumemnet.serving.merged_layers import merge
from gpumemnet.training.samples import Samples


@dataclass(frozen=True)
class Packed:
    """All models' merged layers one after the other; `pad` cuts a batch out of them."""

    kinds: Tensor
    tokens: Tensor
    weights: Tensor
    begins: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, samples: Samples) -> Packed:
        merged = [merge(kinds, tokens) for kinds, tokens in zip(samples.kinds, samples.tokens, strict=True)]
        lengths = np.array([len(one.weights) for one in merged])
        return cls(
            kinds=torch.from_numpy(np.concatenate([one.kinds for one in merged])),
            tokens=torch.from_numpy(np.concatenate([one.tokens for one in merged])),
            weights=torch.from_numpy(np.concatenate([one.weights for one in merged])),
            begins=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]])),
            lengths=torch.from_numpy(lengths),
        )

    def pad(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Kinds, tokens and weights of these models, filled up to the longest with layers of weight 0."""
        places = torch.arange(int(self.lengths[rows].max()))
        real = places < self.lengths[rows][:, None]
        where = torch.where(real, self.begins[rows][:, None] + places, 0)
        return self.kinds[where], self.tokens[where], self.weights[where] * real


def batches(lengths: Tensor, rows: Tensor, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Rows in batches of similar length, so that little is padding; which meet, and in which order, is chance."""
    jitter = torch.rand(len(rows), generator=generator)
    order = rows[torch.argsort(lengths[rows] * (0.8 + 0.4 * jitter))]
    cut = order.split(size)
    return [cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()]
