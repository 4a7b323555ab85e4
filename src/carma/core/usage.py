"""What each GPU did, hour by hour: sums that are seen and not logged, taken out now and then for the archive.

What was not watched is in no row, so sums never claim more than was seen. A span counts in the hour in which it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from carma.core.ports import GpuUsage
from carma.core.state import State

HOUR_S = 3600.0


def add_up(one: GpuUsage, other: GpuUsage) -> GpuUsage:
    """Two rows of the same GPU and hour."""
    return replace(
        one,
        watched_s=one.watched_s + other.watched_s,
        held_s=one.held_s + other.held_s,
        shared_s=one.shared_s + other.shared_s,
        sm_s=one.sm_s + other.sm_s,
        energy_j=one.energy_j + other.energy_j,
        idle_j=one.idle_j + other.idle_j,
        tasks_j=one.tasks_j + other.tasks_j,
    )


def count(state: State, rows: Iterable[GpuUsage]) -> None:
    """Add rows to what was seen since the last `taken`."""
    for row in rows:
        place = (row.hour, row.gpu)
        known = state.usage.get(place)
        state.usage[place] = row if known is None else add_up(known, row)


def taken(state: State) -> tuple[GpuUsage, ...]:
    """What was seen since the last call, for the archive. If the archive refuses it, `count` puts it back."""
    rows = tuple(state.usage.values())
    state.usage.clear()
    return rows
