"""Measures single operators at several sizes, so that a formula can be read off.

An entry builds its inputs and gives (call, inputs to differentiate); no inputs means forward only. Three kinds of
sizes: rows x columns, images, sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .meter import DTYPES, Meter, Row, forward_backward

Built = tuple[Callable[[], Any], list[Any]]

ROWS = [[64, 256], [1000, 1000], [4096, 768], [20000, 512], [333, 4097], [262144, 16]]
IMAGES = [[2, 8, 32, 32], [8, 64, 56, 56], [4, 3, 224, 224], [16, 96, 33, 47], [32, 256, 14, 14], [64, 512, 28, 28]]
SEQUENCES = [[2, 64, 256], [8, 128, 768], [4, 1000, 512], [16, 512, 768], [32, 197, 384]]


class Inputs:
    """Makes the tensors of one case."""

    def __init__(self, params: Row, meter: Meter) -> None:
        self.shape: list[int] = params["shape"]
        self.device = meter.device
        self.dtype = DTYPES[params["dtype"]]
        self.channels_last = bool(params.get("channels_last"))

    def grad(self, *shape: int) -> Any:
        """A tensor to differentiate for; without a shape, of the case's own."""
        return self.data(*shape).requires_grad_()

    def data(self, *shape: int) -> Any:
        """A tensor of values between 0 and 1 (some operators refuse others)."""
        made = torch.rand(*(shape or self.shape), device=self.device).to(self.dtype)
        return made.to(memory_format=torch.channels_last) if self.channels_last and made.dim() == 4 else made

    def index(self, high: int, *shape: int) -> Any:
        """Indices below ``high``."""
        return torch.randint(high, shape, device=self.device)

    def mask(self) -> Any:
        """Half of the case's shape."""
        return torch.rand(*self.shape, device=self.device) < 0.5

    def module(self, module: Any) -> Any:
        """A module where the tensors are."""
        return module.to(device=self.device, dtype=self.dtype)


def unary(call: Callable[[Any], Any], differentiable: bool = True) -> Callable[[Inputs], Built]:
    """An operator of one tensor."""

    def build(make: Inputs) -> Built:
        x = make.grad() if differentiable else make.data()
        return (lambda: call(x)), ([x] if differentiable else [])

    return build


def inplace(call: Callable[[Any], Any]) -> Callable[[Inputs], Built]:
    """An operator that overwrites its input; a copy that passes gradients through stands before it."""

    def build(make: Inputs) -> Built:
        x = make.grad()
        copy = x.clone()
        return (lambda: call(copy)), [x]

    return build


def of_module(make_module: Callable[[list[int]], Any]) -> Callable[[Inputs], Built]:
    """A module applied to one tensor; its parameters get gradients too."""

    def build(make: Inputs) -> Built:
        module = make.module(make_module(make.shape))
        x = make.grad()
        return (lambda: module(x)), [x, *module.parameters()]

    return build


def measure(params: Row, meter: Meter) -> list[Row]:
    """Rows of one operator at one size."""
    from .operator_tables import TABLES

    torch.backends.cuda.matmul.allow_tf32 = bool(params.get("tf32"))
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    call, inputs = TABLES[params["table"]][params["name"]](Inputs(params, meter))
    return forward_backward(meter, call, inputs)


def cases(broad: bool) -> list[Row]:
    """Every operator at every size, in three precisions (a quick run: fewer sizes)."""
    from .operator_tables import INTEGER_ONLY, TABLES

    listed: list[Row] = []
    shapes = {"rows": ROWS, "images": IMAGES, "sequences": SEQUENCES}
    for table, entries in TABLES.items():
        for name in entries:
            dtypes = ["fp32"] if name in INTEGER_ONLY else ["fp32", "bf16", "fp16"]
            for dtype in dtypes if broad else dtypes[:2]:
                for shape in shapes[table] if broad else shapes[table][:3]:
                    row: Row = {"op": "operator", "table": table, "name": name, "dtype": dtype, "shape": shape}
                    listed.append(row)
                    if table == "images" and dtype != "fp16":
                        listed.append({**row, "channels_last": True})
    return listed
