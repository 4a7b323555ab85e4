"""Memory sources of a simulation: what a task's estimate says before it has ever run. The trace tells the figures.

`trace` stands for CARMA's own trial run. There are no figures of it for the published tasks and the software that they
ran with, so it is played by its measured errors: estimate and bound are the true peak times what they came to, as parts
of the truth, in a training run on an H200 that is drawn by chance (trial_ratios.csv). The draw belongs to the seed and
to a task's name, as one command is tried once. It shows what errors of that size do, not how well a task is known.
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
    """The true peak, declared by the user: what is published as the oracle."""
    return Estimate(footprint_mib=row.memory_mib, upper_mib=row.memory_mib, source="declared")


def no_estimate(_row: TraceTask) -> NoEstimate:
    return NoEstimate(source="none", reason="nobody is asked how much memory a task takes")


def _published(column: str, name: str) -> Source:
    def source(row: TraceTask) -> Estimate | NoEstimate:
        found: int | None = getattr(row, column)
        if found is None:
            return NoEstimate(source=name, reason=f"the trace has no estimate by {name}")
        return Estimate(footprint_mib=found, upper_mib=found, source=name)

    return source


@cache
def trial_ratios() -> tuple[tuple[float, float], ...]:
    """(estimate, bound) of each measured run, as parts of what it took."""
    text = resources.files("carma_lab.simulator").joinpath("trial_ratios.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")][1:]
    pairs = (line.split(",") for line in lines)
    return tuple((float(estimate), float(bound)) for estimate, bound in pairs)


def trial(seed: int, row: TraceTask) -> Estimate:
    """What a trial run might have said, by its errors elsewhere."""
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
