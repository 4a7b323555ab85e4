"""The learners by name, and how many members each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gpumemnet.training.attention import Attention
from gpumemnet.training.dense import Dense
from gpumemnet.training.ensemble import Fit
from gpumemnet.training.fit import Packed, ask_layers, on_layers, side_by_side
from gpumemnet.training.graph import fit_graph
from gpumemnet.training.samples import Numbers, Samples, Scale, Wholes
from gpumemnet.training.trees import fit_boosted, fit_forests


@dataclass(frozen=True)
class DenseMembers:
    net: Dense

    def z(self, samples: Samples) -> Numbers:
        with torch.no_grad():
            found: Numbers = self.net(torch.from_numpy(samples.scalars)).double().numpy()
        return found


@dataclass(frozen=True)
class AttentionMembers:
    nets: Sequence[Attention]

    def z(self, samples: Samples) -> Numbers:
        scalars, layers = torch.from_numpy(samples.scalars), Packed.of(samples)
        return np.stack([ask_layers(net, scalars, layers).double().numpy() for net in self.nets])


def fit_dense(
    samples: Samples, z: Numbers, rows_of: Sequence[Wholes], scale: Scale, seed: int, *, rounds: int = 120
) -> DenseMembers:
    torch.manual_seed(seed)
    net = Dense(samples.scalars, scale.room_mib, members=len(rows_of))
    side_by_side(
        net,
        torch.from_numpy(samples.scalars),
        torch.from_numpy(z).float(),
        [torch.from_numpy(rows) for rows in rows_of],
        rounds=rounds,
        seed=seed,
    )
    return DenseMembers(net.eval())


def fit_attention(
    samples: Samples, z: Numbers, rows_of: Sequence[Wholes], scale: Scale, seed: int, *, rounds: int = 60
) -> AttentionMembers:
    layers, scalars, truth = Packed.of(samples), torch.from_numpy(samples.scalars), torch.from_numpy(z).float()
    tokens = np.concatenate(samples.tokens)
    nets = []
    for member, rows in enumerate(rows_of):
        torch.manual_seed(seed * 1000 + member)
        net = Attention(samples.scalars, tokens, scale.room_mib)
        on_layers(net, scalars, layers, truth, torch.from_numpy(rows), rounds=rounds, seed=seed * 1000 + member)
        nets.append(net.eval())
    return AttentionMembers(nets)


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
