"""Measured groups of tasks that share an H200, for the fits of core/scheduling/sharing_model.py.

The tables are those of `carma bench interference` in lab/results/h200.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from carma.core.model.values import Demand

FOLDER = Path("lab/results/h200")
MPS, MPS_FIRST, SLICES = "interference-mps.json", "interference-mps-first.json", "interference-timeslice.json"
IDLE_W, LIMIT_W = 75.0, 700.0  # of the H200: without tasks, and its power limit


class Group(NamedTuple):
    tasks: tuple[str, ...]
    demands: tuple[Demand, ...]
    rates: tuple[float, ...]  # against running alone


def load(name: str, engine: dict[str, float] | None = None) -> list[Group]:
    """`engine`: engine activity by task, for a table that was measured before it was read."""
    table = json.loads((FOLDER / name).read_text())
    alone: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        if len(row["tasks"]) == 1 and row["percent"] == [100]:
            alone.setdefault(row["tasks"][0], []).append(row)
    demands = {
        task: _demand(rows, table["measure_s"], None if engine is None else engine[task])
        for task, rows in alone.items()
    }
    groups = []
    for row in table["rows"]:
        if len(row["tasks"]) > 1 and set(row["percent"]) == {100}:
            solo = row.get("solo_rates") or [mean(one["rates"][0] for one in alone[task]) for task in row["tasks"]]
            rates = tuple(min(1.0, rate / base) for rate, base in zip(row["rates"], solo, strict=True))
            groups.append(Group(tuple(row["tasks"]), tuple(demands[task] for task in row["tasks"]), rates))
    return groups


def _demand(rows: Sequence[dict[str, Any]], measure_s: float, engine: float | None) -> Demand:
    watts = mean(row["energy_j"] for row in rows) / measure_s
    return Demand(
        sm_active=mean(row["sm_active"] for row in rows),
        sm_occupancy=mean(row["sm_occupancy"] for row in rows),
        dram_active=mean(row["dram_active"] for row in rows),
        gr_active=mean(row["gr_active"] for row in rows) if engine is None else engine,
        power=min(1.0, max(0.0, (watts - IDLE_W) / (LIMIT_W - IDLE_W))),
    )


def mps_and_slices() -> tuple[list[Group], list[Group], list[Group]]:
    """The groups under MPS, those of the earlier table, and those in time slices.

    Engine activity was measured for the first table only; the same tasks have it in the others.
    """
    groups = load(MPS)
    engine = {task: demand.gr_active or 0.0 for task, demand in demands_of(groups).items()}
    return groups, load(MPS_FIRST, engine), load(SLICES, engine)


def demands_of(groups: Sequence[Group]) -> dict[str, Demand]:
    return {task: demand for group in groups for task, demand in zip(group.tasks, group.demands, strict=True)}


def without(group: Group) -> Group:
    """The same as a server sees it that knows neither engine activity nor power of its tasks."""
    plain = tuple(Demand(one.sm_active, one.sm_occupancy, one.dram_active) for one in group.demands)
    return group._replace(demands=plain)


def proxies(groups: Sequence[Group]) -> dict[str, float]:
    """How engine activity and power follow from what every server knows; least squares without a constant term."""
    rows = list(demands_of(groups).values())
    aa = sum(one.sm_active**2 for one in rows)
    ab = sum(one.sm_active * one.dram_active for one in rows)
    bb = sum(one.dram_active**2 for one in rows)
    ya = sum(one.sm_active * (one.power or 0.0) for one in rows)
    yb = sum(one.dram_active * (one.power or 0.0) for one in rows)
    even = aa * bb - ab * ab
    above = median((one.gr_active or 0.0) - one.sm_active for one in rows if (one.gr_active or 0.0) < 0.98)
    return {
        "engine_above_sm": round(above, 3),
        "power_of_sm": round((ya * bb - yb * ab) / even, 3),
        "power_of_dram": round((yb * aa - ya * ab) / even, 3),
    }
