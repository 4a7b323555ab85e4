"""The MLP-based net: all scalars through a few residual layers to quantiles.

All members of an ensemble are one module with a leading axis: small nets, trained side by side in one product each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from carma.train.heads import Scaling, quantiles
from carma.train.samples import Floats
from carma.train.scale import QUANTILES


class Layered(nn.Module):
    """A linear layer for each member: [members, rows, inputs] to [members, rows, outputs]."""

    def __init__(self, members: int, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, inputs, outputs) * gain / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.matmul(rows, self.weight) + self.bias


class Dense(nn.Module):
    def __init__(self, columns: Floats, *, members: int, width: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.scaling = Scaling(columns)
        self.enter = Layered(members, columns.shape[1], width)
        self.inner = nn.ModuleList(Layered(members, width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(Layered(members, width, width, 0.3) for _ in range(blocks))
        self.leave = Layered(members, width, len(QUANTILES), 0.1)
        self.width = width

    def forward(self, scalars: Tensor) -> Tensor:
        """[rows, scalars], or [members, rows, scalars], to z of [members, rows, quantiles]."""
        now = nn.functional.silu(self.enter(self.scaling(scalars)))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            now = now + outer(nn.functional.silu(inner(nn.functional.layer_norm(now, (self.width,)))))
        return quantiles(self.leave(now))
