"""How far the truth lies from the sharing model: each task of a group has a factor of its own, the same whenever the
group meets again under the same seed. Policies know the model only, so that they are wrong as they would be in life.

How wrong that is was measured: the spread is that of the model's errors about tasks that it was not fitted on, by how
many share the GPU and how much slower they are said to get (core/scheduling/sharing_model.py, SPREAD).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random
from zlib import crc32

from carma.core.scheduling.sharing_model import Mechanism, spread


class Noise:
    """Log-normal; `scale` 1: as wide as measured, 0: the model is the truth."""

    def __init__(self, scale: float, seed: int, mechanism: Mechanism = "mps") -> None:
        self._scale, self._seed, self._mechanism = scale, seed, mechanism
        self._known: dict[tuple[str, ...], float] = {}

    def factors(self, names: Sequence[str], rates: Sequence[float]) -> list[float]:
        """Of the rates that the model says for tasks of these names that share a GPU."""
        if self._scale == 0.0:
            return [1.0] * len(names)
        group = tuple(sorted(names))
        return [
            exp(self._scale * spread(rate, len(names), self._mechanism) * self._drawn((name, *group)))
            for name, rate in zip(names, rates, strict=True)
        ]

    def _drawn(self, who: tuple[str, ...]) -> float:
        """From the standard normal distribution."""
        if who not in self._known:
            text = "\0".join((str(self._seed), *who))
            self._known[who] = Random(crc32(text.encode())).gauss(0.0, 1.0)
        return self._known[who]
