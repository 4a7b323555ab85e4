"""Memory sources of a simulation: the estimate of a task before its first run, from the columns of the trace.

`trace` stands for CARMA's trial run. No trial runs of the published tasks exist, so their errors are simulated:
estimate and bound are the true peak times the ratios of a training run on an H200 that is drawn at random
(trial_ratios.csv). The draw depends on the seed and the task's name, because a command is tried once. The source shows
the effect of errors of that size, not the accuracy for a particular task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from math import ceil
from random import Random
from zlib import crc32

from carma.core.model.values import Estimate, NoEstimate
from carma.errors import Usage
from carma.traces import TraceTask

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
def trial_ratios() -> tuple[tuple[float, float], ...]:
    """(estimate, bound) of each measured run, relative to its peak."""
    text = resources.files("carma_lab.simulator").joinpath("trial_ratios.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")][1:]
    pairs = (line.split(",") for line in lines)
    return tuple((float(estimate), float(bound)) for estimate, bound in pairs)


def trial(seed: int, row: TraceTask) -> Estimate:
    """A simulated answer of a trial run, with the errors of a measured run."""
    drawn = Random(crc32(f"{seed}\0{row.name}".encode()))
    estimate, bound = drawn.choice(trial_ratios())
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
