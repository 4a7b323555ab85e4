"""Memory sources of a simulation: what a task's estimate says before it has ever run. The trace tells the figures."""

from __future__ import annotations

from collections.abc import Callable

from carma.core.model import Estimate, NoEstimate
from carma.errors import Usage
from carma.traces import TraceTask

Source = Callable[[TraceTask], Estimate | NoEstimate]


def measured(row: TraceTask) -> Estimate:
    """The true peak, declared by the user: what is published as the oracle."""
    return Estimate(footprint_mib=row.memory_mib, upper_mib=row.memory_mib, source="declared")


def nobody(_row: TraceTask) -> NoEstimate:
    return NoEstimate(source="none", reason="nobody is asked how much memory a task takes")


def _published(column: str, name: str) -> Source:
    def source(row: TraceTask) -> Estimate | NoEstimate:
        found: int | None = getattr(row, column)
        if found is None:
            return NoEstimate(source=name, reason=f"the trace has no estimate by {name}")
        return Estimate(footprint_mib=found, upper_mib=found, source=name)

    return source


SOURCES: dict[str, Source] = {
    "measured": measured,
    "none": nobody,
    "horus": _published("horus_mib", "horus"),
    "faketensor": _published("faketensor_mib", "faketensor"),
    "gpumemnet": _published("gpumemnet_mib", "gpumemnet"),
}


def find(name: str) -> Source:
    if name not in SOURCES:
        raise Usage(f"{name}: no such memory source", f"There are: {', '.join(SOURCES)}.")
    return SOURCES[name]
