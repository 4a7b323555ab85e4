"""How far the truth lies from the sharing model: each group of tasks has a factor of its own, the same whenever the
group meets again under the same seed. Policies know the model only, so that they are wrong as they would be in life.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random
from zlib import crc32


class Noise:
    """Log-normal with a spread of `sigma`; 0: the model is the truth."""

    def __init__(self, sigma: float, seed: int) -> None:
        self._sigma, self._seed = sigma, seed
        self._known: dict[tuple[str, ...], float] = {}

    def factors(self, names: Sequence[str]) -> list[float]:
        """Of the rates of tasks of these names that share a GPU."""
        if self._sigma == 0.0:
            return [1.0] * len(names)
        group = tuple(sorted(names))
        return [self._factor((name, *group)) for name in names]

    def _factor(self, who: tuple[str, ...]) -> float:
        if who not in self._known:
            text = "\0".join((str(self._seed), *who))
            self._known[who] = exp(Random(crc32(text.encode())).gauss(0.0, self._sigma))
        return self._known[who]
