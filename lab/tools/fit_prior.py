"""What a task counts as of which nothing is known but its memory (carma/core/scheduling/sharing_model.py, BY_SIZE):
fitted and checked.

    python -m lab.tools.fit_prior > lab/results/simulation/prior.json

Fitted on the runs of the data set whose activity was measured on an H200, by their footprint: of each figure what nine
in ten runs of that size have at most, and an SM activity with which one fares no better than the worst tenth of them
(wide kernels hold their own). Held against tasks that it was not fitted on, those published of an A100. Both ways: how
a task that is not known fares beside one (`burden`), and how one fares beside a task that is not known (`promise`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import BY_SIZE, UNKNOWN, by_size, progress_rates
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
    worst = float(np.quantile([_fares(demand) for demand in demands], 1.0 - MOST))
    lower = (replace(rounded, sm_active=place / 100) for place in range(int(100 * rounded.sm_active), 0, -1))
    return next(demand for demand in lower if _fares(demand) <= worst)


def _fares(demand: Demand) -> float:
    return progress_rates([demand, UNKNOWN])[0]


def held(tasks: Sequence[Sized]) -> dict[str, Any]:
    """Shares of the tasks for which the prior slows a neighbour at least as much, and is slowed by it at least as much,
    as the measured demand."""
    burden = [_fares_beside(by_size(int(mib))) <= _fares_beside(demand) for mib, demand in tasks]
    promise = [_fares(by_size(int(mib))) <= _fares(demand) for mib, demand in tasks]
    return {
        "tasks": len(tasks),
        "burden": round(float(np.mean(burden)), 3),
        "promise": round(float(np.mean(promise)), 3),
    }


def _fares_beside(demand: Demand) -> float:
    """How a task that is not known fares beside that one."""
    return progress_rates([UNKNOWN, demand])[0]


def within(tasks: Sequence[Sized], edge: int) -> list[Sized]:
    below = max((other for other in EDGES_MIB if other < edge), default=0)
    return [entry for entry in tasks if below <= entry[0] < edge]


def main() -> None:
    runs = measured()
    published = [(float(task.memory_mib), task.demand) for task in shipped_table().tasks.values()]
    told = {
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
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
