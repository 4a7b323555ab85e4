"""How nets are trained: AdamW, a rate that rises and falls once, a fixed number of rounds.

Nothing is stopped early by what is judged later: the length of the training is set, the same for every fold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpumemnet.training.heads import pinball
from gpumemnet.training.layer_batches import Packed, batches


class Descent:
    """The optimizer and its rate over so many steps."""

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
