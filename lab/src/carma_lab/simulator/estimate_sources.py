"""What is known of a task before its first run: estimates of its memory from the columns of the trace, and a predicted
demand.

`trace` stands for CARMA's trial run. No trial runs of the published tasks exist, so their errors are simulated:
estimate and bound are the true peak times the ratios of a training run on an H200 that is drawn at random
(trial_ratios.csv). The draw depends on the seed and the task's name, because a command is tried once. The source shows
the effect of errors of that size, not the accuracy for a particular task.

The demand that a trial run would predict is simulated in the same way, because the layers of the published tasks are
not known: one of the models with the most similar demand is drawn (demand_errors.csv: models in real use, none of which
was used for fitting), and its error is applied to the task. The errors are those of an H200; on other cards they may be
larger.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from math import ceil, exp, log
from random import Random
from zlib import crc32

from carma.core.model.values import Demand, Estimate, NoEstimate
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM, engine_share
from carma.errors import Usage
from carma.traces import TraceTask

Numbers = tuple[float, ...]
Source = Callable[[TraceTask], Estimate | NoEstimate]
LEVEL = 0.99  # of the bounds in trial_ratios.csv


def measured(row: TraceTask) -> Estimate:
    """The true peak, declared by the user; the publication calls this source the oracle."""
    return Estimate(footprint_mib=row.memory_mib, upper_mib=row.memory_mib, source="declared")


def no_estimate(_row: TraceTask) -> NoEstimate:
    return NoEstimate(source="none", reason="this simulation uses no memory estimates")


def _published(column: str, name: str) -> Source:
    def source(row: TraceTask) -> Estimate | NoEstimate:
        found: int | None = getattr(row, column)
        if found is None:
            return NoEstimate(source=name, reason=f"the trace has no estimate by {name}")
        return Estimate(footprint_mib=found, upper_mib=found, source=name)

    return source


@cache
def _rows(file: str) -> tuple[Numbers, ...]:
    text = resources.files("carma_lab.simulator").joinpath(file).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")][1:]
    return tuple(tuple(map(float, line.split(","))) for line in lines)


def random_for(seed: int, *words: str) -> Random:
    """The same for the same words under one seed."""
    return Random(crc32("\0".join((str(seed), *words)).encode()))


def trial(seed: int, row: TraceTask) -> Estimate:
    """A simulated answer of a trial run, with the errors of a measured run."""
    estimate, bound = random_for(seed, row.name).choice(_rows("trial_ratios.csv"))  # relative to the peak
    return Estimate(
        footprint_mib=ceil(row.memory_mib * estimate),
        upper_mib=ceil(row.memory_mib * bound),
        source="trace",
        level=LEVEL,
        warnings=("drawn from the errors of trial runs of other tasks",),
    )


COLUMN_OF = {"horus": "horus_mib", "faketensor": "faketensor_mib", "gpumemnet": "gpumemnet_mib"}
SOURCES: dict[str, Source] = {
    "measured": measured,
    "none": no_estimate,
    **{name: _published(column, name) for name, column in COLUMN_OF.items()},
}
NAMES = (*SOURCES, "trace")


def find(name: str, seed: int = 0) -> Source:
    if name == "trace":
        return partial(trial, seed)
    if name not in SOURCES:
        raise Usage(f"{name}: no such memory source", f"There are: {', '.join(NAMES)}.")
    return SOURCES[name]


ALIKE = 12  # models to draw from
EDGE = 0.005  # minimum distance of a share from 0 and 1


def errors() -> list[tuple[Numbers, Numbers]]:
    """(truth, predicted) of each model: SM activity, SM occupancy, DRAM, any kernel, power."""
    return [(row[:5], row[5:]) for row in _rows("demand_errors.csv")]


def predict_demand(seed: int, row: TraceTask) -> Demand:
    truth = _figures(row.demand)
    alike = sorted(errors(), key=lambda pair: sum((one - own) ** 2 for one, own in zip(pair[0], truth, strict=True)))
    was, predicted = random_for(seed, "demand", row.name).choice(alike[:ALIKE])
    return Demand(*(round(_moved(*each), 3) for each in zip(truth, was, predicted, strict=True)))


def _figures(demand: Demand) -> Numbers:
    """Values that the trace lacks are those that the sharing model assumes."""
    drawn = POWER_OF_SM * demand.sm_active + POWER_OF_DRAM * demand.dram_active
    power = min(1.0, drawn) if demand.power is None else demand.power
    return (demand.sm_active, demand.sm_occupancy, demand.dram_active, engine_share(demand), power)


def _moved(truth: float, was: float, predicted: float) -> float:
    """The truth moved by the error in log-odds, so that a share stays between 0 and 1."""
    return share_of(odds_of(truth) + odds_of(predicted) - odds_of(was))


def share_of(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))


def odds_of(share: float) -> float:
    """Logarithm of the odds."""
    inner = min(1.0 - EDGE, max(EDGE, share))
    return log(inner / (1.0 - inner))
