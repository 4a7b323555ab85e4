"""Trains nets: inputs and outputs that all nets share, batches of layers, and the training loop.

AdamW with a learning rate that rises and falls once, and a fixed number of rounds, the same for every fold: rows for
evaluation never stop the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpumemnet.serving.model import merge
from gpumemnet.training.samples import MEDIAN, QUANTILES, Floats, Samples


def descend(
    net: nn.Module,
    answer: Callable[[Any], Tensor],
    z: Tensor,
    batches: Callable[[], Iterable[Any]],
    steps: int,
    rounds: int,
    rate: float = 3e-3,
    decay: float = 0.02,
) -> None:
    """`answer`: z of the net for picked rows. `batches`: the picked rows of one round, `steps` of them."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=decay)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps * rounds, pct_start=0.1)
    for _ in range(rounds):
        for picked in batches():
            optimizer.zero_grad()
            pinball(answer(picked), z[picked]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            rates.step()


def ask_layers(net: nn.Module, scalars: Tensor, layers: Packed, size: int = 256) -> Tensor:
    """Predicts in batches of similar length; the results are in the order of the rows."""
    order = torch.argsort(layers.lengths)
    with torch.no_grad():
        answers = torch.cat([net(scalars[picked], *layers.pad(picked)) for picked in order.split(size)])
    return answers[torch.argsort(order)]


WIDEST = 6.0  # standard deviations beyond which inputs are clipped: a net is useless far outside


class Scaling(nn.Module):
    """Standardises each column; a constant column becomes 0."""

    def __init__(self, columns: Floats) -> None:
        super().__init__()
        spread = columns.std(axis=0)
        spread[spread < 1e-6] = float("inf")
        self.register_buffer("mean", torch.from_numpy(columns.mean(axis=0)))
        self.register_buffer("factor", torch.from_numpy(1.0 / spread))

    def forward(self, columns: Tensor) -> Tensor:
        return ((columns - self.mean) * self.factor).clamp(-WIDEST, WIDEST)


def quantiles(raw: Tensor) -> Tensor:
    """Quantiles from unconstrained numbers: the median, and steps up and down from it that are never negative."""
    steps = nn.functional.softplus(raw - 3.0)
    median = raw[..., MEDIAN : MEDIAN + 1]
    up = median + torch.cumsum(steps[..., MEDIAN + 1 :], -1)
    down = [median]
    for place in range(MEDIAN - 1, -1, -1):
        down.insert(0, down[0] - steps[..., place : place + 1])
    return torch.cat([*down, up], -1)


def pinball(found: Tensor, truth: Tensor) -> Tensor:
    """The loss whose minimum is at the quantiles; `truth` lacks the last axis of `found`."""
    levels = torch.tensor(QUANTILES, dtype=found.dtype)
    miss = truth[..., None] - found
    return torch.maximum(levels * miss, (levels - 1.0) * miss).sum(-1).mean()


@dataclass(frozen=True)
class Packed:
    """The merged layers of all models, concatenated; `pad` returns a batch of them."""

    kinds: Tensor
    tokens: Tensor
    weights: Tensor
    begins: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, samples: Samples) -> Packed:
        merged = list(map(merge, samples.kinds, samples.tokens))
        lengths = np.array([len(one.weights) for one in merged])
        return cls(
            kinds=torch.from_numpy(np.concatenate([one.kinds for one in merged])),
            tokens=torch.from_numpy(np.concatenate([one.tokens for one in merged])),
            weights=torch.from_numpy(np.concatenate([one.weights for one in merged])),
            begins=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]])),
            lengths=torch.from_numpy(lengths),
        )

    def pad(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Kinds, tokens and weights of these models, padded with layers of weight 0."""
        places = torch.arange(int(self.lengths[rows].max()))
        real = places < self.lengths[rows][:, None]
        where = torch.where(real, self.begins[rows][:, None] + places, 0)
        return self.kinds[where], self.tokens[where], self.weights[where] * real


def batches(lengths: Tensor, rows: Tensor, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Rows in batches of similar length, so that there is little padding; their composition and order are random."""
    jitter = torch.rand(len(rows), generator=generator)
    order = rows[torch.argsort(lengths[rows] * (0.8 + 0.4 * jitter))]
    cut = order.split(size)
    return [cut[place] for place in torch.randperm(len(cut), generator=generator).tolist()]
