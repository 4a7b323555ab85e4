"""Measures what optimizers and gradient clipping take, over many tensors of mixed sizes."""

from __future__ import annotations

import random
from typing import Any

import torch

from .meter import DTYPES, Meter, Row

WAYS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False},
}
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 1e-4}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.0}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 1e-4, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adafactor", {}),
]


def shapes(seed: int, large: bool) -> list[list[int]]:
    """Fifty shapes such as a network has: matrices, kernels, and many short vectors."""
    rng = random.Random(seed)
    widest = 2048 if large else 256
    made: list[list[int]] = []
    for number in range(50):
        side = rng.choice([16, 64, 100, widest // 2, widest])
        made.append([side] if number % 2 else [side, rng.choice([3, 27, 64, widest])])
    return made


def cases(broad: bool) -> list[Row]:
    """Every optimizer in every way, over small and large tensors."""
    listed: list[Row] = []
    for name, options in OPTIMIZERS:
        for way in WAYS:
            if (way == "fused" and name not in FUSED) or (name == "Adafactor" and way == "default"):
                continue
            for large in (False, True) if broad else (True,):
                for dtype in ("fp32", "bf16") if broad else ("fp32",):
                    row = {"op": "optimizer", "name": name, "options": options, "way": way, "large": large}
                    listed.append({**row, "dtype": dtype})
    for name in ("clip", "scaler"):
        for way in ("default", "foreach", "loop"):
            listed += [{"op": name, "way": way, "large": large, "dtype": "fp32"} for large in (False, True)]
    return listed


def parameters(params: Row, meter: Meter) -> list[Any]:
    """Parameters with gradients."""
    made = []
    for shape in shapes(7, params["large"]):
        tensor = torch.nn.Parameter(torch.ones(shape, device=meter.device, dtype=DTYPES[params["dtype"]]))
        tensor.grad = torch.ones_like(tensor)
        made.append(tensor)
    return made


def with_sizes(rows: list[Row], tensors: list[Any]) -> list[Row]:
    """Each row with the totals that a formula needs."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    extra = {"tensors": len(sizes), "total_bytes": sum(sizes), "largest_bytes": max(sizes)}
    return [{**row, **extra} for row in rows]


def optimizer(params: Row, meter: Meter) -> list[Row]:
    """The first step (it makes the state), the second and the third."""
    tensors = parameters(params, meter)
    made = getattr(torch.optim, params["name"])(tensors, **params["options"], **WAYS[params["way"]])
    rows = [meter.read(lambda: made.step() and None).row(f"step{number}") for number in (1, 2, 3)]
    return with_sizes(rows, tensors)


def clip(params: Row, meter: Meter) -> list[Row]:
    """Clipping the norm of all gradients."""
    tensors = parameters(params, meter)
    way = WAYS[params["way"]].get("foreach")
    rows = [meter.read(lambda: torch.nn.utils.clip_grad_norm_(tensors, 1.0, foreach=way)).row("clip_norm")]
    rows.append(meter.read(lambda: torch.nn.utils.clip_grad_value_(tensors, 1.0, foreach=way)).row("clip_value"))
    return with_sizes(rows, tensors)


def scaler(params: Row, meter: Meter) -> list[Row]:
    """Unscaling and stepping through a gradient scaler."""
    tensors = parameters(params, meter)
    made = torch.optim.AdamW(tensors, **WAYS[params["way"]])
    scale = torch.amp.GradScaler(meter.device)
    rows = [meter.read(lambda: scale.scale(torch.ones(1, device=meter.device))).row("scale")]
    rows.append(meter.read(lambda: scale.unscale_(made)).row("unscale"))
    rows.append(meter.read(lambda: scale.step(made)).row("step"))
    rows.append(meter.read(lambda: scale.update()).row("update"))
    return with_sizes(rows, tensors)
