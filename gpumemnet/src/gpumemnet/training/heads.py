"""What all nets share: inputs brought to one scale, quantiles that cannot cross, and their loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpumemnet.training.samples import Floats
from gpumemnet.training.target_scale import MEDIAN, QUANTILES

WIDEST = 6.0  # inputs further than so many deviations from the mean are cut there: a net is no use far outside


class Scaling(nn.Module):
    """Mean and deviation of each column; a column that never changes says nothing and becomes 0."""

    def __init__(self, columns: Floats) -> None:
        super().__init__()
        spread = columns.std(axis=0)
        spread[spread < 1e-6] = float("inf")
        self.register_buffer("mean", torch.from_numpy(columns.mean(axis=0)))
        self.register_buffer("factor", torch.from_numpy(1.0 / spread))

    def forward(self, columns: Tensor) -> Tensor:
        return ((columns - self.mean) * self.factor).clamp(-WIDEST, WIDEST)


def quantiles(raw: Tensor) -> Tensor:
    """From as many free numbers: the median, and steps up and down from it that are never negative."""
    steps = nn.functional.softplus(raw - 3.0)
    median = raw[..., MEDIAN : MEDIAN + 1]
    up = median + torch.cumsum(steps[..., MEDIAN + 1 :], -1)
    down = [median]
    for place in range(MEDIAN - 1, -1, -1):
        down.insert(0, down[0] - steps[..., place : place + 1])
    return torch.cat([*down, up], -1)


def pinball(found: Tensor, truth: Tensor) -> Tensor:
    """The loss whose least is at the quantiles; `truth` lacks the last axis of `found`."""
    levels = torch.tensor(QUANTILES, dtype=found.dtype)
    miss = truth[..., None] - found
    return torch.maximum(levels * miss, (levels - 1.0) * miss).sum(-1).mean()
