"""Ops of the generator, and the seeded random generator."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gpumemnet.dataset.ranges import INPLACE

Ops = list[dict[str, Any]]
FLAGS = {"bias": True}  # defaults of flags in inside/build.py; all others are off
Drawn = dict[str, Any]  # fields of a config that describe its model


def op(name: str, **fields: Any) -> dict[str, Any]:
    """An op without the fields that are None and the flags that have their default."""
    given = {f: value for f, value in fields.items() if value is not None and value is not FLAGS.get(f, False)}
    return {"op": name, **given}


def branches(how: str, *bodies: Ops) -> dict[str, Any]:
    return op(how, bodies=list(bodies))


def act(f: str, inplace: bool = False, functional: bool = False) -> dict[str, Any]:
    """The activation, in place only if the layer before it does not need its output: after a convolution, a norm, a
    linear layer."""
    return op("act", f=f, inplace=inplace and f in INPLACE, functional=functional and f != "prelu")


def dropout(p: float, functional: bool = False) -> Ops:
    return [op("dropout", p=p, functional=functional)] if p else []


def probability(dice: Dice, share: float, span: tuple[float, float]) -> float:
    """Probability of a dropout; 0 if there is none."""
    return round(dice.uniform(span), 2) if dice.chance(share) else 0.0


Word = TypeVar("Word")


class Dice:
    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def uniform(self, span: tuple[float, float]) -> float:
        low, high = span
        return low + (high - low) * self._random.random()

    def whole(self, span: tuple[int, int]) -> int:
        return min(span[1], math.floor(self.uniform((span[0], span[1] + 1))))

    def log(self, span: tuple[int, int]) -> int:
        """An integer, log-uniform: as likely from 10 to 20 as from 100 to 200."""
        low, high = span
        return max(low, min(high, math.floor(math.exp(self.uniform((math.log(low), math.log(high + 1)))))))

    def mixed(self, span: tuple[int, int]) -> int:
        """Half log-uniform, half uniform: many small numbers and some large ones."""
        return self.log(span) if self.chance(0.5) else self.whole(span)

    def word(self, weights: Mapping[Word, float]) -> Word:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def of(self, values: Sequence[int]) -> int:
        return values[self.whole((0, len(values) - 1))]
