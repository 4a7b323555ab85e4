"""The Transformer-based net: attention over the layers of one model, then sums that follow the physics.

Each layer's token gives factors for its kept bytes and its weight bytes; their sum over the layers is divided by the
arithmetic's estimate. The mean and maximum of the tokens join the scalars and correct that sum. Attention is over the
layers of one model: other models of a batch, and padding, are masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpumemnet.serving.features import FEATURES, PLACE, TOKEN
from gpumemnet.serving.model import ABSENT, NEAR
from gpumemnet.training.fit import Scaling, quantiles
from gpumemnet.training.samples import QUANTILES, Floats

ITSELF = 1  # index of a layer among its neighbours


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, layers: Tensor, bias: Tensor) -> Tensor:
        """Layers [n, L, width]; bias [n, 1, 1, L], the logarithm of the number of equal layers."""
        rows, count, width = layers.shape
        parts = self.mixed(self.before(layers)).reshape(rows, count, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(width // self.heads) + bias
        seen = torch.matmul(scores.softmax(-1), value).transpose(1, 2).reshape(rows, count, width)
        layers = layers + self.joined(seen)
        return layers + self.narrow(nn.functional.silu(self.wide(self.between(layers))))


class Attention(nn.Module):
    def __init__(self, scalars: Floats, tokens: Floats, room_mib: float, *, width: int = 32, blocks: int = 1) -> None:
        super().__init__()
        self.room_mib = room_mib
        self.scaling, self.sizing = Scaling(scalars), Scaling(tokens)
        self.kind = nn.ModuleList(nn.Embedding(ABSENT + 1, width) for _ in range(NEAR))
        self.sizes = nn.ModuleList(nn.Linear(len(TOKEN), width) for _ in range(NEAR))
        self.setting = nn.Linear(len(FEATURES), width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.counts = nn.Linear(width, 3)  # factors of the kept bytes, weights and outputs of a layer
        self.enter = nn.Linear(len(FEATURES) + 2 * width + 1, 2 * width)
        self.inner, self.outer = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, 2 * width)
        self.leave = nn.Linear(2 * width, len(QUANTILES))
        for layer in (self.counts, self.leave):
            nn.init.zeros_(layer.bias)
            layer.weight.data *= 0.1
        for table in self.kind:
            table.weight.data *= 0.3

    def forward(self, scalars: Tensor, kinds: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Scalars [n, S], kinds [n, L, 3], tokens [n, L, 3, T] and weights [n, L] to z of [n, quantiles]."""
        setting = self.scaling(scalars)
        layers = self.setting(setting)[:, None, :]
        for near in range(NEAR):
            present = (kinds[:, :, near] != ABSENT).to(tokens.dtype)[..., None]
            layers = (
                layers
                + self.kind[near](kinds[:, :, near])
                + self.sizes[near](self.sizing(tokens[:, :, near])) * present
            )
        layers = nn.functional.silu(layers)
        bias = weights.clamp(min=1e-30).log()[:, None, None, :]
        for block in self.blocks:
            layers = block(layers, bias)
        ratio = self.ratio(layers, scalars, tokens[:, :, ITSELF], weights)
        part = weights[..., None]
        mean = (layers * part).sum(1) / part.sum(1)
        most = (layers + (part.clamp(max=1e-30).log() + 69.0776)).amax(1)
        joined = torch.cat([setting, mean, most, ratio], -1)
        now = nn.functional.silu(self.enter(joined))
        now = now + self.outer(nn.functional.silu(self.inner(now)))
        return quantiles(self.leave(now))

    def ratio(self, layers: Tensor, scalars: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """The logarithm of the summed bytes over the arithmetic's estimate, [n, 1]."""
        factors = self.counts(layers).clamp(-4.0, 4.0).exp()
        sizes = torch.exp2(tokens)
        slots = scalars[:, PLACE["slots"], None]
        kept, weight, output = (sizes[..., TOKEN.index(name)] for name in ("kept_mib", "weight_mib", "output_mib"))
        # The factor of an output starts small: what is kept of it is in `kept` already.
        summed = kept * factors[..., 0] + weight * (2.0 + slots) * factors[..., 1] + 0.1 * output * factors[..., 2]
        whole = (summed * weights).sum(1, keepdim=True)
        guess = torch.exp2(scalars[:, PLACE["guess_mib"], None]) - 1.0
        return torch.log((whole + self.room_mib) / (guess + self.room_mib))
