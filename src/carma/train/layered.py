"""A model's layers as a sequence for the Transformer-based net: each layer with its two neighbours, equal ones merged.

Networks repeat themselves: of 160 layers of a decoder some 16 differ in what they are and what is next to them. The net
knows places only by neighbours, so n equal layers are one with weight n, and attention over the few gives what
attention over all would, in a tenth of the time. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from carma.estimate.gpumemnet.kinds import KINDS
from carma.train.samples import Floats, Samples, Wholes

ABSENT = len(KINDS)  # the neighbour of the first and of the last layer, and padding
NEAR = 3  # before, itself, behind


@dataclass(frozen=True)
class Merged:
    """The layers of one model that differ: kinds [layers, 3], tokens [layers, 3, T], how many of each."""

    kinds: Wholes
    tokens: Floats
    weights: Floats


def merge(kinds: Wholes, tokens: Floats) -> Merged:
    rows = np.concatenate([kinds[:, None].astype(np.float32), tokens], axis=1)
    none = np.zeros((1, rows.shape[1]), np.float32)
    none[0, 0] = ABSENT
    around = np.concatenate([none, rows, none])
    near = np.concatenate([around[:-2], around[1:-1], around[2:]], axis=1)
    different, counts = np.unique(near, axis=0, return_counts=True)
    apart = different.reshape(len(different), NEAR, rows.shape[1])
    return Merged(apart[:, :, 0].astype(np.int64), np.ascontiguousarray(apart[:, :, 1:]), counts.astype(np.float32))


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


def triples(kinds: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kinds [n, L], tokens [n, L, T] and the mask of real layers, unmerged: the same as `pad` gives, with weights of 1."""
    kinds = torch.where(mask, kinds, ABSENT)
    tokens = tokens * mask[..., None]
    none, nothing = torch.full_like(kinds[:, :1], ABSENT), torch.zeros_like(tokens[:, :1])
    around = torch.cat([none, kinds, none], 1)
    values = torch.cat([nothing, tokens, nothing], 1)
    return (
        torch.stack([around[:, :-2], around[:, 1:-1], around[:, 2:]], 2),
        torch.stack([values[:, :-2], values[:, 1:-1], values[:, 2:]], 2),
        mask.to(tokens.dtype),
    )


def batches(lengths: Tensor, rows: Tensor, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Rows in batches of similar length, so that little is padding; which meet, and in which order, is chance."""
    jitter = torch.rand(len(rows), generator=generator)
    order = rows[torch.argsort(lengths[rows] * (0.8 + 0.4 * jitter))]
    cut = order.split(size)
    return [cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()]


