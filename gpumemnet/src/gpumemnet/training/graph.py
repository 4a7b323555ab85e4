"""A later baseline: a graph network on the layer graph, similar to DNNPerf.

Nodes are layers, edges are tensors between them, in both directions. Rounds of messages update edges from their ends
and nodes from their edges, with attention over the edges; an attention-weighted sum over the nodes joins the scalars.
Tokens, scale and quantiles are those of the other nets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from carma.trial.layers.kinds import KINDS
from gpumemnet.serving.features import FEATURES, TOKEN
from gpumemnet.training.ensemble import Separate, each_member
from gpumemnet.training.fit import Scaling, descend, quantiles
from gpumemnet.training.samples import QUANTILES, Floats, Numbers, Samples, Scale, Wholes

MOST_SOURCES = 4
BATCH = 64


@dataclass(frozen=True)
class Graphs:
    """Several models as one graph without edges between them; `owner` is the model of each layer."""

    scalars: Tensor
    kinds: Tensor
    tokens: Tensor
    owner: Tensor
    edges: Tensor  # [2, edges], in both directions

    @classmethod
    def of(cls, samples: Samples) -> Graphs:
        counts = samples.layer_counts
        begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
        edges = np.concatenate(
            [nearest(edge) + begin for edge, begin in zip(samples.edges, begins, strict=True)], axis=1
        )
        return cls(
            scalars=torch.from_numpy(samples.scalars),
            kinds=torch.from_numpy(np.concatenate(samples.kinds)),
            tokens=torch.from_numpy(np.concatenate(samples.tokens)),
            owner=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
            edges=torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1)),
        )


def nearest(edges: Wholes, most: int = MOST_SOURCES) -> Wholes:
    """The last few sources of each layer. In a residual network every earlier block is a source: a deep transformer
    would have as many edges as pairs of layers."""
    order = np.lexsort((-edges[0], edges[1]))
    source, target = edges[:, order]
    begins = np.searchsorted(target, target)  # the first source of each target
    kept = np.arange(len(target)) - begins < most
    return np.stack([source[kept], target[kept]])


def shares(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """Softmax within each group."""
    risen = (scores - scores.max()).exp()
    sums = torch.zeros(count, dtype=risen.dtype).index_add(0, groups, risen)
    return risen / sums[groups].clamp(min=1e-20)


class Messages(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ends, self.score = nn.Linear(3 * width, width), nn.Linear(width, 1)
        self.node, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor, ways: Tensor) -> tuple[Tensor, Tensor]:
        source, target = ways
        edges = edges + nn.functional.silu(self.ends(torch.cat([nodes[source], nodes[target], edges], -1)))
        part = shares(self.score(edges)[:, 0].clamp(-20.0, 20.0), target, len(nodes))
        heard = torch.zeros_like(nodes).index_add(0, target, edges * part[:, None])
        return self.norm(nodes + nn.functional.silu(self.node(torch.cat([nodes, heard], -1)))), edges


class GraphNet(nn.Module):
    def __init__(self, scalars: Floats, tokens: Floats, *, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.scaling, self.sizing = Scaling(scalars), Scaling(tokens)
        self.kind, self.sizes = nn.Embedding(len(KINDS), width), nn.Linear(len(TOKEN), width)
        self.way = nn.Linear(1, width)
        self.rounds = nn.ModuleList(Messages(width) for _ in range(rounds))
        self.weigh = nn.Linear(width, 1)
        self.enter = nn.Linear(len(FEATURES) + 2 * width, 2 * width)
        self.inner, self.leave = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, len(QUANTILES))

    def forward(self, graphs: Graphs) -> Tensor:
        sizes = self.sizing(graphs.tokens)
        nodes = nn.functional.silu(self.kind(graphs.kinds) + self.sizes(sizes))
        # An edge carries the source's output, whose size is the first token.
        edges = self.way(sizes[graphs.edges[0]][:, :1])
        for messages in self.rounds:
            nodes, edges = messages(nodes, edges, graphs.edges)
        count = len(graphs.scalars)
        weighed = nodes * shares(self.weigh(nodes)[:, 0].clamp(-20.0, 20.0), graphs.owner, count)[:, None]
        empty = torch.zeros(count, nodes.shape[1])
        layers = torch.zeros(count).index_add(0, graphs.owner, torch.ones(len(nodes)))
        pooled = (empty.index_add(0, graphs.owner, weighed), empty.index_add(0, graphs.owner, nodes) / layers[:, None])
        now = nn.functional.silu(self.enter(torch.cat([self.scaling(graphs.scalars), *pooled], -1)))
        return quantiles(self.leave(now + nn.functional.silu(self.inner(now))))


def fit_graph(
    samples: Samples, z: Numbers, rows_of: Sequence[Wholes], _scale: Scale, seed: int, *, rounds: int = 25
) -> Separate:
    tokens, truth = np.concatenate(samples.tokens), torch.from_numpy(z).float()

    def train(rows: Wholes, own_seed: int) -> nn.Module:
        torch.manual_seed(own_seed)
        net, chance = GraphNet(samples.scalars, tokens), np.random.default_rng(own_seed)

        def shuffled() -> Sequence[Wholes]:
            order = chance.permutation(rows)
            return [order[begin : begin + BATCH] for begin in range(0, len(order), BATCH)]

        steps = -(-len(rows) // BATCH)
        descend(net, lambda picked: net(Graphs.of(samples.take(picked))), truth, shuffled, steps, rounds)
        return net.eval()

    return Separate(each_member(train, rows_of, seed), _ask)


def _ask(net: GraphNet, samples: Samples) -> Numbers:
    parts = [samples.take(rows) for rows in np.array_split(np.arange(len(samples)), -(-len(samples) // 128))]
    with torch.no_grad():
        found: Numbers = torch.cat([net(Graphs.of(part)) for part in parts]).double().numpy()
    return found
