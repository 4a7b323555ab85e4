"""Ops as the generator writes them, and what all families share: an activation, a dropout, a model half drawn."""

from __future__ import annotations

from typing import Any

import msgspec

from gpumemnet.dataset.random_draws import Dice
from gpumemnet.dataset.ranges import INPLACE

Ops = list[dict[str, Any]]


class Drawn(msgspec.Struct, kw_only=True):
    """A model before its batch, optimizer and precision are known."""

    shape: str
    input: tuple[int, ...]
    outputs: int
    model: Ops
    vocabulary: int = 0
    target: int = 0
    loss: str = "classes"
    checkpointing: bool = False
    channels_last: bool = False


def op(name: str, **fields: Any) -> dict[str, Any]:
    return {"op": name, **fields}


def branches(how: str, *bodies: Ops) -> dict[str, Any]:
    return {"op": how, "bodies": list(bodies)}


def act(f: str, inplace: bool = False, functional: bool = False) -> dict[str, Any]:
    """In place only where the layer before it does not need its output: after a convolution, a norm, a linear layer."""
    made = op("act", f=f)
    if inplace and f in INPLACE:
        made["inplace"] = True
    if functional and f != "prelu":
        made["functional"] = True
    return made


def dropout(p: float, functional: bool = False) -> Ops:
    if not p:
        return []
    return [op("dropout", p=p, functional=True) if functional else op("dropout", p=p)]


def probability(dice: Dice, share: float, span: tuple[float, float]) -> float:
    """Of a dropout; 0: there is none."""
    return round(dice.uniform(span), 2) if dice.chance(share) else 0.0
