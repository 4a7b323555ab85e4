"""The MLP-based net: sums that follow the physics, corrected by residual layers over all scalars.

The outputs of each kind of layer have a learned factor, which depends on the settings; so do weights, gradients and the
optimizer. Their sum is divided by the arithmetic's estimate. All members of an ensemble are one module with a leading
axis: small nets, trained together in one product each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from carma.trial.layers.kinds import KINDS
from gpumemnet.serving.features import PLACE
from gpumemnet.serving.saved_tensors import MIB
from gpumemnet.training.fit import Scaling, quantiles
from gpumemnet.training.samples import QUANTILES, Floats, Numbers, Samples

_OUTPUTS = tuple(PLACE[f"output_{kind}"] for kind in KINDS)  # in elements, like `largest_output`
_BYTES = ("resting_mib", "gradients_mib", "kept_mib", "scores_mib")
_SUMS = (*_OUTPUTS, PLACE["largest_output"], PLACE["last_output"], *(PLACE[name] for name in _BYTES))
_MIB_EACH = (*((4.0 / MIB,) * (len(_OUTPUTS) + 2)), *((1.0,) * len(_BYTES)))


class Layered(nn.Module):
    """A linear layer for each member: [members, rows, inputs] to [members, rows, outputs]."""

    def __init__(self, members: int, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, inputs, outputs) * gain / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.matmul(rows, self.weight) + self.bias


class Dense(nn.Module):
    def __init__(self, columns: Floats, room_mib: float, *, members: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.room_mib, self.width, self.members = room_mib, width, members
        self.scaling = Scaling(columns)
        self.register_buffer("sums", torch.tensor(_SUMS))
        self.register_buffer("each_mib", torch.tensor(_MIB_EACH))
        self.counts = Layered(members, columns.shape[1], len(_SUMS), 0.05)
        self.enter = Layered(members, columns.shape[1] + 1, width)
        self.inner = nn.ModuleList(Layered(members, width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(Layered(members, width, width, 0.3) for _ in range(blocks))
        self.leave = Layered(members, width, len(QUANTILES), 0.01)

    def z(self, samples: Samples) -> Numbers:
        with torch.no_grad():
            found: Numbers = self(torch.from_numpy(samples.scalars)).double().numpy()
        return found

    def forward(self, scalars: Tensor) -> Tensor:
        """[rows, scalars], or [members, rows, scalars], to z of [members, rows, quantiles]."""
        scalars = scalars.expand(self.members, -1, -1)
        setting = self.scaling(scalars)
        ratio = self.ratio(setting, scalars)
        now = nn.functional.silu(self.enter(torch.cat([setting, ratio], -1)))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            now = now + outer(nn.functional.silu(inner(nn.functional.layer_norm(now, (self.width,)))))
        return quantiles(self.leave(now))

    def ratio(self, setting: Tensor, scalars: Tensor) -> Tensor:
        """The logarithm of the summed bytes over the arithmetic's estimate, [members, rows, 1]."""
        factors = self.counts(setting).clamp(-4.0, 4.0).exp()
        sizes = (torch.exp2(scalars.index_select(-1, self.sums)) - 1.0) * self.each_mib
        whole = (sizes * factors).sum(-1, keepdim=True)
        guess = torch.exp2(scalars[..., PLACE["guess_mib"], None]) - 1.0
        return torch.log((whole + self.room_mib) / (guess + self.room_mib))
