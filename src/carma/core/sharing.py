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

What follows: alone the rate is 1; a neighbour never makes a task faster; a rate lies in (0, 1]. Time slices can lose
outright (two tasks that keep the GPU busy: 0.87 in total; measured 0.91 for a large pair), MPS cannot here.

Constants and errors come from tables measured on an H200 (results/h200/sharing.json, by `python -m tools.fit_sharing`):
a task's rate, with every group that holds it left out of the fit. What a task alone shows is taken from its Demand;
where engine activity or power is not known, it is guessed from SM and DRAM activity, which costs accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Literal

from carma.core.model import Demand

PRESS, CROWD, WIDTH = 0.587, 2.65, 2.331  # A, B, C
SLICES = 0.875  # of the GPU's time, where tasks take turns in slices
SLACK = 3.0  # the sharpness of the corner between slack and slow-down; 2 to 4 fit alike
# Of those who do not tell: engine activity over SM activity, and power from SM and DRAM activity (25 tasks, H200).
ENGINE_ABOVE_SM = 0.136
POWER_OF_SM, POWER_OF_DRAM = 0.78, 0.295


def progress_rates(demands: Sequence[Demand], mechanism: Literal["mps", "timeslice"] = "mps") -> tuple[float, ...]:
    """Each task's speed relative to running alone, in (0, 1], for tasks that share one GPU."""
    if len(demands) < 2:
        return (1.0,) * len(demands)
    return _at_once(demands) if mechanism == "mps" else _in_slices(demands)


def _at_once(demands: Sequence[Demand]) -> tuple[float, ...]:
    powers = [_power(demand) for demand in demands]
    total, turns = sum(powers), 1.0 / len(demands)
    rates = []
    for demand, own in zip(demands, powers, strict=True):
        pressed, engine = max(0.0, total - own), _engine(demand)
        stretch = 1.0 + PRESS * pressed + CROWD * exp(-WIDTH * _part(demand.sm_active)) * pressed**2
        rate = (1.0 - engine**SLACK + (engine * stretch) ** SLACK) ** (-1.0 / SLACK)
        rates.append(min(1.0, max(turns, rate)))
    return tuple(rates)


def _in_slices(demands: Sequence[Demand]) -> tuple[float, ...]:
    """Max-min fair: who wants less than an equal part gets it, and the others share what that leaves."""
    wanted = [_engine(demand) for demand in demands]
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


def _engine(demand: Demand) -> float:
    """The share of time with any kernel: never less than SM activity; not nothing, for a task that uses the GPU."""
    sm = _part(demand.sm_active)
    return max(sm, _part(demand.gr_active)) if demand.gr_active is not None else min(1.0, sm + ENGINE_ABOVE_SM)


def _power(demand: Demand) -> float:
    if demand.power is not None:
        return _part(demand.power)
    return _part(POWER_OF_SM * _part(demand.sm_active) + POWER_OF_DRAM * _part(demand.dram_active))


def _part(value: float) -> float:
    """Into 0..1; what is unknown (NaN) counts as the worst case."""
    return min(1.0, max(0.0, value)) if value == value else 1.0
