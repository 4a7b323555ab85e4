"""Trains nets: inputs and outputs that all nets share, batches of layers, and the training loops.

AdamW with a learning rate that rises and falls once, and a fixed number of rounds, the same for every fold: rows for
evaluation never stop the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gpumemnet.serving.model import merge
from gpumemnet.training.samples import MEDIAN, QUANTILES, Floats, Samples


class Descent:
    """The optimizer and its learning rate over `steps`."""

    def __init__(self, net: nn.Module, steps: int, rate: float, decay: float) -> None:
        self._net = net
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=decay)
        self._rate = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, rate, total_steps=steps, pct_start=0.1)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._net.parameters(), 5.0)
        self._optimizer.step()
        self._rate.step()


def side_by_side(
    net: nn.Module, scalars: Tensor, z: Tensor, rows_of: Sequence[Tensor], *, rounds: int, seed: int, size: int = 64
) -> None:
    """All members of `dense` at once, each on its own rows."""
    chance = torch.Generator().manual_seed(seed)
    fewest = min(len(rows) for rows in rows_of)
    size = min(size, fewest)
    steps = fewest // size
    descent = Descent(net, steps * rounds, 5e-3, 0.05)
    for _ in range(rounds):
        order = torch.stack([rows[torch.randperm(len(rows), generator=chance)[: steps * size]] for rows in rows_of])
        for picked in order.split(size, 1):
            descent.step(pinball(net(scalars[picked]), z[picked]))


def on_layers(
    net: nn.Module, scalars: Tensor, layers: Packed, z: Tensor, rows: Tensor, *, rounds: int, seed: int, size: int = 64
) -> None:
    """One member of `attention` on its rows."""
    chance = torch.Generator().manual_seed(seed)
    descent = Descent(net, -(-len(rows) // size) * rounds, 3e-3, 0.02)
    for _ in range(rounds):
        for picked in batches(layers.lengths, rows, size, chance):
            descent.step(pinball(net(scalars[picked], *layers.pad(picked)), z[picked]))


def ask_layers(net: nn.Module, scalars: Tensor, layers: Packed, size: int = 256) -> Tensor:
    """In batches of similar length; the answers in the order of the rows."""
    order = torch.argsort(layers.lengths)
    with torch.no_grad():
        answers = torch.cat([net(scalars[picked], *layers.pad(picked)) for picked in order.split(size)])
    back = torch.empty_like(answers)
    back[order] = answers
    return back


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
    """From free numbers: the median, and steps up and down from it that are never negative."""
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
