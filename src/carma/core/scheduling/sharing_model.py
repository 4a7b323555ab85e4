"""How fast tasks progress when they share a GPU, and what the GPU then shows. Pure arithmetic, no state.

A task alone runs at rate 1. It keeps the GPU's engine busy for a share g of the time (engine activity); the rest is
its own slack: data loading, launching, waiting for the host.

Under MPS kernels of all tasks run at once. What slows a task is how hard the others press, and the best single measure
of that is the power they draw, as a share o of what the card can draw above idle: it sums up SMs, memory and clocks,
and the card's power limit is a limit that they share. The GPU's part of a step is stretched by

    1 + A * o + B * exp(-C * s) * o ** 2

where s is the task's own SM activity: narrow kernels wait for a place between wide ones, wide ones hold their own. The
stretched part hides in the slack as long as there is any, so the rate is (1 - g**3 + (g * stretch)**3) ** (-1/3), and
never below taking turns.

Time slices are simpler: tasks get max-min fair parts of the GPU's time, of which switching takes 13 %.

What follows: alone the rate is 1; a neighbour never makes a task faster, nor does one that asks for more; a rate lies
in (0, 1]. Time slices can lose outright (two tasks that keep the GPU busy: 0.87 in total; measured 0.91 for a large
pair), MPS cannot here. Of one thing more helps, but only the task itself: wide kernels (SM activity) hold their own.

**What is not known.** The model is off, by more the more it slows a task down. `cautious` gives the rate that nine in
ten tasks keep to or beat, of tasks with which it was not fitted: what a policy promises should rest on that. A demand
that is None stands for a task of which nothing is known and counts as UNKNOWN, cautious or not. Where engine activity
or power is unknown, it is estimated from SM and DRAM activity, and the caution is larger.

**What is learned.** Observed steps correct the rates of commands that ran beside others (rate_correction.py).

Constants and errors come from tables measured on an H200 (lab/results/simulation/sharing.json, by `python -m
lab.tools.sharing_fit`): a task's rate, with every group that holds it left out of the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, inf
from typing import Literal

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import Correction, Demand
from carma.core.scheduling.rate_correction import corrected, uncertainty

Mechanism = Literal["mps", "timeslice"]

PRESS, CROWD, WIDTH = 0.587, 2.65, 2.331  # A, B, C
SLICES = 0.875  # of the GPU's time, where tasks take turns in slices
SLACK = 3.0  # the sharpness of the corner between slack and slow-down; 2 to 4 fit alike
# Without these metrics: engine activity above SM activity, and power from SM and DRAM activity (25 tasks, H200).
ENGINE_ABOVE_SM = 0.136
POWER_OF_SM, POWER_OF_DRAM = 0.78, 0.295
# Assumed for a task of unknown demand: engine activity and power that nine in ten of the 25 tasks do not exceed, and an
# SM activity at which the predicted rate is that of the slowest tenth of them.
UNKNOWN = Demand(sm_active=0.73, sm_occupancy=0.36, dram_active=0.27, gr_active=1.0, power=0.77)
# Assumed for a task of known memory and unknown demand, by an upper limit of the memory in MiB: values that nine in ten
# tasks of that size do not exceed. Small tasks keep less of a GPU busy (1,252 runs, H200;
# lab/results/simulation/prior.json, by `python -m lab.tools.fit_prior`).
BY_SIZE = (
    (1_500, Demand(sm_active=0.35, sm_occupancy=0.12, dram_active=0.12, gr_active=0.54, power=0.35)),
    (3_000, Demand(sm_active=0.61, sm_occupancy=0.23, dram_active=0.24, gr_active=0.82, power=0.63)),
)
# The median of each figure over the tasks of that size: what a task of unknown demand is expected to be (same source).
TYPICAL_BY_SIZE = (
    (1_500, Demand(sm_active=0.17, sm_occupancy=0.06, dram_active=0.04, gr_active=0.3, power=0.16)),
    (3_000, Demand(sm_active=0.37, sm_occupancy=0.13, dram_active=0.1, gr_active=0.54, power=0.32)),
    (6_000, Demand(sm_active=0.58, sm_occupancy=0.2, dram_active=0.15, gr_active=0.74, power=0.48)),
    (12_000, Demand(sm_active=0.68, sm_occupancy=0.24, dram_active=0.19, gr_active=0.85, power=0.59)),
    (inf, Demand(sm_active=0.81, sm_occupancy=0.3, dram_active=0.27, gr_active=0.93, power=0.67)),
)
# A cautious rate is rate * exp(-(a + b * (1 - rate))): one in ten of the tasks measured is slower. One (a, b) for any
# number of tasks, or a newcomer could make its neighbours look faster; the second where engine activity or power is
# guessed.
CAUTION: dict[Mechanism, tuple[tuple[float, float], tuple[float, float]]] = {
    "mps": ((0.123, 0.36), (0.131, 0.764)),
    "timeslice": ((0.137, 0.0), (0.156, 0.0)),
}
# (c, d) by the number of tasks on a GPU: log(true rate / predicted rate) is normally distributed with the standard
# deviation c + d * (1 - predicted rate).
SPREAD: dict[Mechanism, dict[int, tuple[float, float]]] = {
    "mps": {2: (0.082, 0.305), 3: (0.083, 0.277), 4: (0.053, 0.304)},
    "timeslice": {2: (0.089, 0.0), 3: (0.092, 0.0), 4: (0.093, 0.0)},
}
# Nine in ten tasks draw at most this much more power than follows from the SM and DRAM activity that was observed of a
# task with the same command (92 tasks observed alone in 12 simulated traces, seeds 5,000 to 5,011: 1.34).
DEMANDING = 1.35
MEASURED = 4  # tasks on a GPU at most; caution grows in proportion beyond
MAX_REMEMBERED = 16_384  # groups whose rates are remembered: the same few kinds of tasks meet again and again


def mechanism_of(rules: Rules) -> Mechanism:
    return "timeslice" if rules.sharing.mechanism == "timeslice" else "mps"


def progress_rates(
    demands: Sequence[Demand | None],
    mechanism: Mechanism = "mps",
    cautious: bool = False,
    corrections: Sequence[Correction | None] = (),
) -> tuple[float, ...]:
    """Each task's speed relative to running alone, in (0, 1], for tasks that share one GPU.

    `cautious`: what nine in ten keep to or beat, instead of what is expected. `corrections`: what is learned of each
    task's command; () if of none.
    """
    if len(demands) < 2:
        return (1.0,) * len(demands)
    known = tuple([UNKNOWN if demand is None else demand for demand in demands])
    rates = _rates(known, mechanism)
    if any(corrections):
        rates = corrected(rates, corrections)
    return _lowered(rates, known, mechanism, corrections) if cautious else rates


@lru_cache(MAX_REMEMBERED)
def _rates(demands: tuple[Demand, ...], mechanism: Mechanism) -> tuple[float, ...]:
    return _at_once(demands) if mechanism == "mps" else _in_slices(demands)


def typical(memory_mib: int) -> Demand:
    """Expected demand of a task of which only the memory is known."""
    return next(demand for below_mib, demand in TYPICAL_BY_SIZE if memory_mib < below_mib)


def by_size(memory_mib: int) -> Demand:
    """Demand of a task of which only the memory is known, in a bad case: nine in ten tasks of that size need less."""
    for below_mib, demand in BY_SIZE:
        if memory_mib < below_mib:
            return demand
    return UNKNOWN


def demanding(observed: Demand) -> Demand:
    """Demand of a task in a bad case, if that of another task with the same command was observed."""
    power, engine = DEMANDING * _power(observed), DEMANDING * engine_share(observed)
    return replace(observed, gr_active=min(1.0, engine), power=min(1.0, power))


def _lowered(
    rates: Sequence[float], demands: Sequence[Demand], mechanism: Mechanism, corrections: Sequence[Correction | None]
) -> tuple[float, ...]:
    known, estimated = CAUTION[mechanism]
    least, slope = known
    for demand in demands:
        if demand is UNKNOWN or demand.power is None or demand.gr_active is None:
            least, slope = estimated
            break
    if len(demands) > MEASURED:
        wider = len(demands) / MEASURED
        least, slope = wider * least, wider * slope
    parts = uncertainty(corrections) if any(corrections) else [1.0] * len(rates)
    return tuple([rate * exp(part * (slope * (rate - 1.0) - least)) for rate, part in zip(rates, parts, strict=True)])


def spread(rate: float, tasks: int, mechanism: Mechanism = "mps") -> float:
    """Standard deviation of the log of a task's true rate, as measured; 0 if the task is alone."""
    if tasks < 2:
        return 0.0
    least, slope = SPREAD[mechanism][min(tasks, MEASURED)]
    return least + slope * (1.0 - rate)


def _at_once(demands: Sequence[Demand]) -> tuple[float, ...]:
    powers = [_power(demand) for demand in demands]
    total, turns = sum(powers), 1.0 / len(demands)
    rates = []
    for demand, own in zip(demands, powers, strict=True):
        pressed, engine, width = total - own, engine_share(demand), demand.sm_active
        if pressed <= 0.0:
            rates.append(1.0)
            continue
        if not 0.0 <= width <= 1.0:
            width = 1.0 if width > 1.0 else 0.0  # unknown (NaN): as narrow as can be
        stretch = 1.0 + (PRESS + CROWD * exp(-WIDTH * width) * pressed) * pressed
        rate = (1.0 + engine**SLACK * (stretch**SLACK - 1.0)) ** (-1.0 / SLACK)
        rates.append(rate if rate > turns else turns)
    return tuple(rates)


def _in_slices(demands: Sequence[Demand]) -> tuple[float, ...]:
    """Max-min fair: a task that needs less than an equal part gets it, and the others share the rest."""
    wanted = [engine_share(demand) for demand in demands]
    rates = [1.0] * len(wanted)
    left, waiting = SLICES, len(wanted)
    for place in sorted(range(len(wanted)), key=wanted.__getitem__):
        got = min(wanted[place], left / waiting)
        rates[place] = got / wanted[place] if wanted[place] > 0 else 1.0
        left, waiting = left - got, waiting - 1
    return tuple(rates)


def activity(demands: Sequence[Demand]) -> Demand:
    """What the GPU shows while those tasks share it."""
    return shown(demands, progress_rates(demands))


def shown(demands: Sequence[Demand], rates: Sequence[float]) -> Demand:
    """What a GPU shows when those tasks run at those rates: a slowed task keeps it busy in proportion.

    AEGIS saw SM activity grow by 40 % while work was done 37 % faster: in proportion, within the noise.
    """
    sm = occupancy = dram = 0.0
    for demand, rate in zip(demands, rates, strict=True):
        sm += demand.sm_active * rate
        occupancy += demand.sm_occupancy * rate
        dram += demand.dram_active * rate
    return Demand(sm_active=min(1.0, sm), sm_occupancy=min(1.0, occupancy), dram_active=min(1.0, dram))


def engine_shown(demands: Sequence[Demand], rates: Sequence[float]) -> float:
    """The share of time with any kernel on a GPU that they share, as if each ran its own at any time."""
    idle = 1.0
    for demand, rate in zip(demands, rates, strict=True):
        idle *= 1.0 - engine_share(demand) * rate
    return 1.0 - idle


def engine_share(demand: Demand) -> float:
    """The share of time with any kernel: never less than SM activity; not nothing, for a task that uses the GPU."""
    sm, engine = demand.sm_active, demand.gr_active
    if not 0.0 <= sm <= 1.0:
        sm = _part(sm)
    if engine is None:
        return min(1.0, sm + ENGINE_ABOVE_SM)
    if not 0.0 <= engine <= 1.0:
        engine = _part(engine)
    return engine if engine > sm else sm


def _power(demand: Demand) -> float:
    power = demand.power
    if power is None:
        sm, dram = demand.sm_active, demand.dram_active
        if not (0.0 <= sm <= 1.0 and 0.0 <= dram <= 1.0):
            sm, dram = _part(sm), _part(dram)
        power = POWER_OF_SM * sm + POWER_OF_DRAM * dram
    return power if 0.0 <= power <= 1.0 else _part(power)


def _part(value: float) -> float:
    """Into 0..1; what is unknown (NaN) counts as the worst case."""
    return min(1.0, max(0.0, value)) if value == value else 1.0
