"""Chance, from one seeded source: a span, a share, a table of words."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

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
        """A whole number; as likely from 10 to 20 as from 100 to 200."""
        low, high = span
        return max(low, min(high, math.floor(math.exp(self.uniform((math.log(low), math.log(high + 1)))))))

    def mixed(self, span: tuple[int, int]) -> int:
        """Half log-uniform, half uniform: many small ones, and yet the large ones."""
        return self.log(span) if self.chance(0.5) else self.whole(span)

    def word(self, weights: Mapping[Word, float]) -> Word:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def of(self, values: Sequence[int]) -> int:
        return values[self.whole((0, len(values) - 1))]
