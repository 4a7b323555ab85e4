"""The learners by name, and how many members each has."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gpumemnet.training.attention import Attention
from gpumemnet.training.dense import Dense
from gpumemnet.training.ensemble import Fit, each_member, fit_boosted, fit_forests
from gpumemnet.training.fit import Packed, ask_layers, batches, descend
from gpumemnet.training.graph import fit_graph
from gpumemnet.training.samples import Numbers, Samples, Scale, Wholes

BATCH = 64


class AttentionMembers(nn.ModuleList):
    def z(self, samples: Samples) -> Numbers:
        scalars, layers = torch.from_numpy(samples.scalars), Packed.of(samples)
        return np.stack([ask_layers(net, scalars, layers).double().numpy() for net in self])


def fit_dense(
    samples: Samples, z: Numbers, rows_of: Sequence[Wholes], scale: Scale, seed: int, *, rounds: int = 120
) -> Dense:
    """All members at once, each on its own rows."""
    torch.manual_seed(seed)
    net = Dense(samples.scalars, scale.room_mib, members=len(rows_of))
    scalars, truth = torch.from_numpy(samples.scalars), torch.from_numpy(z).float()
    chance = torch.Generator().manual_seed(seed)
    fewest = min(map(len, rows_of))
    size = min(BATCH, fewest)
    steps = fewest // size

    def shuffled() -> Any:
        orders = [torch.randperm(len(rows), generator=chance)[: steps * size] for rows in rows_of]
        picked = [torch.from_numpy(rows)[order] for rows, order in zip(rows_of, orders, strict=True)]
        return torch.stack(picked).split(size, 1)

    descend(net, lambda picked: net(scalars[picked]), truth, shuffled, steps, rounds, 5e-3, 0.05)
    net.eval()
    return net


def fit_attention(
    samples: Samples, z: Numbers, rows_of: Sequence[Wholes], scale: Scale, seed: int, *, rounds: int = 60
) -> AttentionMembers:
    layers, scalars, truth = Packed.of(samples), torch.from_numpy(samples.scalars), torch.from_numpy(z).float()
    tokens = np.concatenate(samples.tokens)

    def train(rows: Wholes, own_seed: int) -> nn.Module:
        torch.manual_seed(own_seed)
        net, chance = Attention(samples.scalars, tokens, scale.room_mib), torch.Generator().manual_seed(own_seed)
        shuffled = functools.partial(batches, layers.lengths, torch.from_numpy(rows), BATCH, chance)
        steps = -(-len(rows) // BATCH)
        descend(net, lambda picked: net(scalars[picked], *layers.pad(picked)), truth, shuffled, steps, rounds)
        return net.eval()

    return AttentionMembers(each_member(train, rows_of, seed))


class Learner(NamedTuple):
    fit: Fit
    members: int
    fewer: int  # if a shape is left out, because there are many shapes


LEARNERS: Mapping[str, Learner] = {
    "mlp-based": Learner(fit_dense, 8, 4),
    "transformer-based": Learner(fit_attention, 3, 2),
    "graph": Learner(fit_graph, 2, 2),
    "extra-trees": Learner(fit_forests, 4, 4),
    "boosted": Learner(fit_boosted, 2, 2),
}
