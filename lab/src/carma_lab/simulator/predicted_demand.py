"""Demand that a trial run would predict for a task: the truth with a measured error.

The layers of the published tasks are not known, so the errors of predictions are simulated (demand_errors.csv: models
in real use, none of which was used for fitting). One of the models with the most similar demand is drawn at random,
and its error is applied to the task. The draw depends on the seed and the task's name, because a command is tried once.
The errors are those of an H200; on other cards they may be larger.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from math import exp, log
from random import Random
from zlib import crc32

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM, engine_share
from carma.traces import TraceTask

ALIKE = 12  # models to draw from
EDGE = 0.005  # minimum distance of a share from 0 and 1
Figures = tuple[float, ...]


@cache
def errors() -> tuple[tuple[Figures, Figures], ...]:
    """(truth, predicted) of each model: SM activity, SM occupancy, DRAM, any kernel, power."""
    text = resources.files("carma_lab.simulator").joinpath("demand_errors.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")][1:]
    rows = [tuple(float(value) for value in line.split(",")) for line in lines]
    return tuple((row[:5], row[5:]) for row in rows)


def predict_demand(seed: int, row: TraceTask) -> Demand:
    truth = _figures(row.demand)
    chance = Random(crc32(f"{seed}\0demand\0{row.name}".encode()))
    alike = sorted(errors(), key=lambda pair: sum((one - own) ** 2 for one, own in zip(pair[0], truth, strict=True)))
    was, said = chance.choice(alike[:ALIKE])
    return Demand(*(round(_moved(*each), 3) for each in zip(truth, was, said, strict=True)))


def _figures(demand: Demand) -> Figures:
    """Values that the trace lacks are those that the sharing model assumes."""
    drawn = POWER_OF_SM * demand.sm_active + POWER_OF_DRAM * demand.dram_active
    power = min(1.0, drawn) if demand.power is None else demand.power
    return (demand.sm_active, demand.sm_occupancy, demand.dram_active, engine_share(demand), power)


def _moved(truth: float, was: float, said: float) -> float:
    """The truth moved by the error in log-odds, so that a share stays between 0 and 1."""
    return share_of(odds_of(truth) + odds_of(said) - odds_of(was))


def share_of(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))


def odds_of(share: float) -> float:
    """Logarithm of the odds."""
    inner = min(1.0 - EDGE, max(EDGE, share))
    return log(inner / (1.0 - inner))
