"""Input of a simulation: its setup, the rules of the daemon for a simulated sampler, and noise of the true speeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from typing import Literal

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, Record
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.rate_correction import BESIDE, NOISE, OWN
from carma.core.scheduling.sharing_model import Mechanism, spread
from carma_lab.runs import figures as result
from carma_lab.simulator.estimate_sources import Source, random_for
from carma_lab.simulator.simulated_cards import Card

QUIET = 1e12  # seconds: samples that are left out because nothing changed do not count as stale

# Knowledge of a task's demand and run time before it runs. measured: the truth. history: from earlier runs of the same
# name and user in this simulation, as in the daemon's history. estimate: history, and for a new name the demand that a
# trial run would predict. none: nothing.
Demands = Literal["measured", "history", "estimate", "none"]


class Setup(Record, frozen=True, kw_only=True):
    """What is simulated. `rules` are those of the daemon."""

    card: Card
    gpus: int
    rules: Rules
    policy: Policy
    source: Source
    demand: Demands = "measured"
    mechanism: Mechanism = "mps"
    seed: int = 0
    noise: float = 0.0  # spread of true speeds about those of the model; 1: as measured
    period_s: float = 5.0  # between two samples
    steps: bool = True  # whether optimizer steps are counted
    launch_s: float = 0.5  # from a placement to the process
    measured: bool = True  # whether GPUs show activity; otherwise power and utilisation only (monitor.sm_activity)
    # For a recorded run (fidelity.py): the knowledge of each task, in the order of the trace, and the GPUs with their
    # own names. Otherwise `source` answers, and there are `gpus` GPUs of type `card`.
    asked: tuple[result.Asked, ...] = ()
    server: tuple[tuple[GpuId, Card], ...] = ()
    watchdog: bool = False  # whether tasks above their bookings are stopped; without it no booking shrinks


def rules_for(setup: Setup) -> Rules:
    """The daemon's rules for such a sampler."""
    window = replace(setup.rules.window, stale_s=QUIET)
    queue = replace(setup.rules.queue, misfits="end")
    sharing = replace(setup.rules.sharing, watchdog=setup.watchdog, mechanism=setup.mechanism)
    return replace(setup.rules, window=window, sharing=sharing, queue=queue)


class Noise:
    """Deviation of the true speeds from the sharing model: a log-normal factor for each task of a group, the same for
    each meeting of the group under one seed. Policies know the model only.

    `scale` 1: spread as measured, 0: the model is the truth. The measured spread is that of the model's errors on tasks
    that it was not fitted on, by number of tasks and predicted slowdown (core/scheduling/sharing_model.py, SPREAD). A
    part of its variance belongs to the task, a part to each pair, and the rest to the group, as in the measured groups
    (core/scheduling/rate_correction.py).
    """

    def __init__(self, scale: float, seed: int, mechanism: Mechanism = "mps") -> None:
        self._scale, self._seed, self._mechanism = scale, seed, mechanism
        self._known: dict[tuple[str, ...], float] = {}

    def factors(self, names: Sequence[str], rates: Sequence[float]) -> list[float]:
        """Factors of the model's rates for tasks of these names that share a GPU."""
        if self._scale == 0.0:
            return [1.0] * len(names)
        return [
            exp(self._scale * spread(rate, len(names), self._mechanism) * self._deviation(place, names))
            for place, rate in enumerate(rates)
        ]

    def _deviation(self, place: int, names: Sequence[str]) -> float:
        name, others = names[place], [*names[:place], *names[place + 1 :]]
        own = sqrt(OWN) * self._drawn((name,))
        beside = sum(sqrt(BESIDE / len(others)) * self._drawn((name, other)) for other in sorted(others))
        rest = sqrt(NOISE) * self._drawn((name, "", *sorted(names)))
        return (own + beside + rest) / sqrt(OWN + BESIDE + NOISE)

    def _drawn(self, words: tuple[str, ...]) -> float:
        """A number from the standard normal distribution."""
        if words not in self._known:
            self._known[words] = random_for(self._seed, *words).gauss(0.0, 1.0)
        return self._known[words]
