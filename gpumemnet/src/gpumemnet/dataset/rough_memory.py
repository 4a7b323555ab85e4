"""A rough figure of what a config takes, without torch: good enough to steer the generator and to keep room by.

All but the weights grows with the batch, so that the batch that fills a wanted footprint follows by division. No
estimator uses it.
"""

from __future__ import annotations

import math

from gpumemnet.dataset.config import Config
from gpumemnet.dataset.program_memory import Walk
from gpumemnet.dataset.program_steps import STEPS
from gpumemnet.dataset.ranges import Common

MIB = 1 << 20
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}


class Guess:
    """Of one model, for any batch."""

    def __init__(self, config: Config, common: Common) -> None:
        self.walk = walk = Walk(config, STEPS)
        self.common = common
        self.precision = config.precision
        each = 2 if config.precision == "bf16" else 4
        self.lasting = walk.weights * each * (1 + SLOTS[config.optimizer])
        self.updating = walk.weights * each * 2  # gradients, and what the optimizer makes for a moment
        self.casting = walk.weights * 2 if walk.amp else 0
        self.sample = walk.saved + walk.inner + 2 * walk.largest * walk.low

    def mib(self, batch: int) -> int:
        peak = max(self.sample * batch + self.casting, self.updating)
        return round(self.common.context_mib + self.common.slack * (self.lasting + peak) / MIB)

    def batch_for(self, mib: float) -> float:
        """May be below one: the weights alone take more."""
        room = (mib - self.common.context_mib) * MIB / self.common.slack - self.lasting - self.casting
        return room / self.sample

    def step_s(self, batch: int) -> float:
        """Forward and backward: three times the operations of the forward pass."""
        walk, rates = self.walk, self.common.rates
        low = self.precision in ("bf16-amp", "fp16-amp", "bf16")
        convolution = rates["convolution"] * (2 if low else 1)
        compute = (
            walk.products / rates[self.precision] + walk.convolutions / convolution + walk.grouped / rates["grouped"]
        )
        return batch * (3 * compute / 1e12 + 6 * walk.traffic / 3e12) + walk.weights * 40 / 3e12

    def most(self) -> int:
        """The largest batch that the limits allow."""
        elements = self.common.tensor_elements // max(1, self.walk.largest)
        inputs = self.common.input_elements // math.prod(self.walk.config.input)
        fixed = self.step_s(0)
        steps = int((self.common.step_s - fixed) / max(1e-12, self.step_s(1) - fixed))
        return min(elements, inputs, steps)
