"""The scale that is learned on: how far the footprint is from the arithmetic, as a logarithm.

z = log((footprint − base) / (guess + room)), with `base` a little (`room`) below the least footprint of the data, which
is what a process holds without tensors. So an error of z is about a share of what the tensors take; the room keeps the
tiniest models, where an allocator's 2 MiB are several times the guess, from filling the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumemnet.training.samples import Numbers, Samples

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
MEDIAN = QUANTILES.index(0.5)
ROOM_MIB = 64.0


@dataclass(frozen=True)
class Scale:
    base_mib: float
    room_mib: float = ROOM_MIB

    @classmethod
    def of(cls, samples: Samples) -> Scale:
        return cls(float(samples.footprint_mib.min()) - ROOM_MIB)

    def to_z(self, samples: Samples) -> Numbers:
        z: Numbers = np.log((samples.footprint_mib - self.base_mib) / (samples.guess_mib + self.room_mib))
        return z

    def to_mib(self, z: Numbers, samples: Samples) -> Numbers:
        """Of quantiles, one row a sample."""
        mib: Numbers = self.base_mib + np.exp(z) * (samples.guess_mib + self.room_mib)[:, None]
        return mib
