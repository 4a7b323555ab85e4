"""What is simulated, and the daemon's rules as they are for a simulated sampler."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random
from typing import Literal
from zlib import crc32

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, Record
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.sharing_model import Mechanism, spread
from carma_lab.runs import figures as result
from carma_lab.simulator.estimate_sources import Source
from carma_lab.simulator.simulated_cards import Card

QUIET = 1e12  # seconds: a sample that was left out because nothing changed is not stale

# What is known of a task's demand and run time before it runs. measured: the truth. history: what earlier runs of that
# name by that user have shown in this simulation, as the daemon's history tells it. estimate: that, and for a new name
# the demand that a trial run would predict. none: nothing.
Demands = Literal["measured", "history", "estimate", "none"]


class Setup(Record, frozen=True, kw_only=True):
    """What is simulated. `rules` are the daemon's own."""

    card: Card
    gpus: int
    rules: Rules
    policy: Policy
    source: Source
    demand: Demands = "measured"
    mechanism: Literal["mps", "timeslice"] = "mps"
    seed: int = 0
    noise: float = 0.0  # the spread of true rates about the model's; 1: as measured
    period_s: float = 5.0  # between two samples
    launch_s: float = 0.5  # from a placement to the process
    watched: bool = False  # whether a course of the GPUs over time is kept
    every_sample: bool = False  # whether all samples are told, each at its time; else those that make a difference
    # Of a run that is played again (fidelity.py): what was known of each task, by its place in the trace, and the GPUs
    # by their own names. Without them `source` tells of a task, and there are `gpus` of `card`.
    asked: tuple[result.Asked, ...] = ()
    server: tuple[tuple[GpuId, Card], ...] = ()
    watchdog: bool = False  # whether it stops tasks above their bookings; without it no booking shrinks either


def rules_for(setup: Setup) -> Rules:
    """As the daemon would have them with such a sampler."""
    window = replace(setup.rules.window, stale_s=QUIET)
    queue = replace(setup.rules.queue, misfits="end")
    sharing = replace(setup.rules.sharing, watchdog=setup.watchdog, mechanism=setup.mechanism)
    return replace(setup.rules, window=window, sharing=sharing, queue=queue)


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
