"""Fits and checks the demand assumed for a task of which only the memory is known (BY_SIZE in
carma/core/scheduling/sharing_model.py).

    python -m lab.tools.fit_prior > lab/results/simulation/prior.json

Fitted on the runs of the data set whose activity was measured on an H200, by their footprint: values that nine in ten
runs of that size do not exceed, and an SM activity at which the predicted rate is that of the slowest tenth of them
(a task with wide kernels is slowed less). Checked on the published tasks of an A100, which had no part in the fit:
`burden` is the share of tasks that slow an unknown neighbour at most as much as the assumed demand does, `promise` the
share whose rate beside an unknown neighbour is at least that of the assumed demand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import BY_SIZE, TYPICAL_BY_SIZE, UNKNOWN, by_size, progress_rates, typical
from carma.traces.table import shipped_table
from carma_lab.simulator.simulated_cards import H200
from gpumemnet.dataset.table import read

DATA = Path("gpumemnet/datasets/h200")
EDGES_MIB = tuple(edge for edge, _ in BY_SIZE)
MOST = 0.9
FIELDS = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power")
Sized = tuple[float, Demand]


def measured(folder: Path = DATA) -> list[Sized]:
    """Footprint and demand of every run with activity."""
    found: list[Sized] = []
    for path in sorted(folder.glob("*.parquet")):
        columns = read(path).columns
        names = ("footprint_mib", "sm_active", "sm_occupancy", "dram_active", "gr_active", "power_w")
        for mib, sm, occupancy, dram, engine, watts in zip(*(columns[name] for name in names), strict=True):
            if sm == sm and sm is not None:
                found.append((float(mib), Demand(sm, occupancy, dram, engine, H200.share_of(watts))))
    return found


def fit(demands: Sequence[Demand]) -> Demand:
    most = Demand(**{name: float(np.quantile([getattr(one, name) for one in demands], MOST)) for name in FIELDS})
    rounded = Demand(**{name: round(getattr(most, name), 2) for name in FIELDS})
    worst = float(np.quantile([_rate(demand) for demand in demands], 1.0 - MOST))
    lower = (replace(rounded, sm_active=place / 100) for place in range(int(100 * rounded.sm_active), 0, -1))
    return next(demand for demand in lower if _rate(demand) <= worst)


def _rate(demand: Demand) -> float:
    return progress_rates([demand, UNKNOWN])[0]


def held(tasks: Sequence[Sized]) -> dict[str, Any]:
    """Shares of the tasks for which the prior slows a neighbour at least as much, and is slowed by it at least as much,
    as the measured demand."""
    burden = [_rate_beside(by_size(int(mib))) <= _rate_beside(demand) for mib, demand in tasks]
    promise = [_rate(by_size(int(mib))) <= _rate(demand) for mib, demand in tasks]
    return {
        "tasks": len(tasks),
        "burden": round(float(np.mean(burden)), 3),
        "promise": round(float(np.mean(promise)), 3),
    }


def _rate_beside(demand: Demand) -> float:
    """Rate of a task of unknown demand beside that one."""
    return progress_rates([UNKNOWN, demand])[0]


def fit_typical(demands: Sequence[Demand]) -> Demand:
    """The median of each figure."""
    return Demand(**{name: round(float(np.median([getattr(one, name) for one in demands])), 2) for name in FIELDS})


def error(tasks: Sequence[Sized]) -> float | None:
    """Mean absolute error of the rate of a task of unknown demand beside these, if they count as typical."""
    errors = [abs(_rate_beside(typical(int(mib))) - _rate_beside(demand)) for mib, demand in tasks]
    return round(float(np.mean(errors)), 3) if errors else None


def within(tasks: Sequence[Sized], edge: float, edges: Sequence[float] = EDGES_MIB) -> list[Sized]:
    below = max((other for other in edges if other < edge), default=0)
    return [entry for entry in tasks if below <= entry[0] < edge]


def typical_sizes(runs: Sequence[Sized], published: Sequence[Sized]) -> list[dict[str, Any]]:
    edges = [edge for edge, _ in TYPICAL_BY_SIZE]
    found = []
    for edge in edges:
        of_size = within(runs, edge, edges)
        demand = fit_typical([demand for _, demand in of_size])
        found.append(
            {
                "below_mib": edge if edge < inf else None,
                "runs": len(of_size),
                "demand": {name: getattr(demand, name) for name in FIELDS},
                "error_for_these": error(of_size),
                "error_for_published": error(within(published, edge, edges)),
            }
        )
    return found


def main() -> None:
    runs = measured()
    published = [(float(task.memory_mib), task.demand) for task in shipped_table().tasks.values()]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m lab.tools.fit_prior",
        "from": f"{len(runs)} runs of gpumemnet/datasets/h200; checked on {len(published)} published tasks (A100)",
        "sizes": [
            {
                "below_mib": edge,
                "runs": len(within(runs, edge)),
                "demand": {name: getattr(fit([demand for _, demand in within(runs, edge)]), name) for name in FIELDS},
                "held_for_these": held(within(runs, edge)),
                "held_for_published": held(within(published, edge)),
            }
            for edge in EDGES_MIB
        ],
        "typical": typical_sizes(runs, published),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
