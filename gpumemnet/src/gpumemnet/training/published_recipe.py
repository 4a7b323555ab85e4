"""The published recipe for comparison: 13 (CNN: 16) small classifiers on a few unscaled features.

Widths of 8 and then 4, batch normalisation, ReLU, Xavier, the mean of their logits, cross-entropy, Adam at 0.001,
batches of 128, at most 600 rounds and an early stop. The difference: new nets for each fold, with rows of their own for
the early stop.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gpumemnet import Family
from gpumemnet.serving.features import PLACE
from gpumemnet.serving.model_facts import GB_MIB
from gpumemnet.training.samples import Samples, Wholes

# The published features of each family that exist here. Transformers have no activation function as an angle.
_ALL = ("layers", "activations", "activations_batch", "parameters", "batch")
COLUMNS: Mapping[Family, tuple[str, ...]] = {
    "mlp": ("layers", "batch", "parameters", "activations", "count_batch_norm", "count_dropout", "cos_function",
            "sin_function"),
    "cnn": (*_ALL, "count_convolution", "count_batch_norm", "count_dropout", "cos_function", "sin_function"),
    "transformer": (*_ALL, "count_attention", "count_linear", "count_norm", "count_dropout"),
}  # fmt: skip
_PLAIN = ("cos_function", "sin_function")
_THIRTEEN = (*range(1, 8), *range(1, 7))
DEPTHS: Mapping[Family, tuple[int, ...]] = {
    "mlp": _THIRTEEN, "cnn": (*range(1, 9), *range(4, 9), *range(4, 7)), "transformer": _THIRTEEN,
}  # fmt: skip
ROUNDS, PATIENCE, BATCH = 600, 30, 128


def columns(samples: Samples) -> Tensor:
    """Columns as published: sizes instead of their logarithms, unscaled."""
    found = []
    for name in COLUMNS[samples.family]:
        values = samples.scalars[:, PLACE[name]].astype(np.float64)
        found.append(values if name in _PLAIN else np.exp2(values) - 1.0)
    return torch.from_numpy(np.stack(found, 1)).float()


class Small(nn.Sequential):
    def __init__(self, inputs: int, classes: int, depth: int) -> None:
        widths = [inputs, 8, *([4] * (depth - 1))]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        layers.append(nn.Linear(widths[-1], classes))
        super().__init__(*layers)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


class Mean(nn.Module):
    def __init__(self, family: Family, classes: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Small(len(COLUMNS[family]), classes, depth) for depth in DEPTHS[family])

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([net(rows) for net in self.nets]).mean(0)


def learn_published(
    samples: Samples, judged: Samples, widths_gb: Sequence[int], seed: int, rounds: int = ROUNDS
) -> dict[int, Wholes]:
    """The classes of `judged` for each width. None is above those in the data."""
    nets = {width: _fit(samples, width, seed, rounds) for width in widths_gb}
    with torch.no_grad():
        return {width: net(columns(judged)).argmax(-1).numpy() for width, net in nets.items()}


def _fit(samples: Samples, width_gb: int, seed: int, rounds: int) -> Mean:
    torch.manual_seed(seed)
    rows, truth = columns(samples), torch.from_numpy((samples.footprint_mib // (width_gb * GB_MIB)).astype(np.int64))
    order = torch.randperm(len(rows))
    watched, learned = order[: len(rows) // 8], order[len(rows) // 8 :]
    net = Mean(samples.family, int(truth.max()) + 1)
    descent = torch.optim.Adam(net.parameters(), lr=1e-3)
    best, kept, since = float("inf"), net.state_dict(), 0
    for _ in range(rounds):
        _round(net.train(), descent, rows, truth, learned)
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net.eval()(rows[watched]), truth[watched]))
        since += 1
        if loss < best:
            best, since = loss, 0
            kept = {name: value.clone() for name, value in net.state_dict().items()}
        if since >= PATIENCE:
            break
    net.load_state_dict(kept)
    net.eval()
    return net


def _round(net: nn.Module, descent: torch.optim.Optimizer, rows: Tensor, truth: Tensor, learned: Tensor) -> None:
    for picked in learned[torch.randperm(len(learned))].split(BATCH):
        if len(picked) > 1:  # batch normalisation needs two rows
            descent.zero_grad()
            nn.functional.cross_entropy(net(rows[picked]), truth[picked]).backward()
            descent.step()
