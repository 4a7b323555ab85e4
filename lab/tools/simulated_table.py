"""Simulated experiments over seeds whose result is one table of a page, for `fairness_table` and `preemption_table`.

1. Runs one policy on a generated trace.
2. Names command, date, versions and GPUs for the file of results.
3. Writes the file, prints the table and puts it into its page.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from carma import __version__
from carma.traces.schema import Trace
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.simulation import Simulation
from tools.markdown import placed

GPUS, CARD, SEEDS = 4, "a100-40", 10
POLICIES = ("exclusive", "magm")


def simulated(trace: Trace, policy: str, seed: int, setting: str, value: bool) -> Simulation:
    settings: dict[str, object] = {setting: "yes" if value else "no"}
    request = Request(
        trace="generated", policy=policy, gpus=GPUS, gpu=CARD, demand="history", seed=seed, settings=settings
    )
    return simulation(request, trace)


def mean(runs: Sequence[NamedTuple]) -> dict[str, float]:
    return {name: round(fmean(getattr(run, name) for run in runs), 4) for name in runs[0]._fields}


def rounded(run: NamedTuple) -> dict[str, float]:
    return {name: round(value, 4) for name, value in run._asdict().items()}


def about(tool: str) -> dict[str, Any]:
    return {**made_by(tool), "gpus": f"{GPUS} x {CARD}, simulated", "seeds": SEEDS}


def made_by(tool: str) -> dict[str, str]:
    return {
        "command": f"python -m {tool}",
        "date": datetime.now(UTC).date().isoformat(),
        "carma": __version__,
        "python": platform.python_version(),
    }


def publish(found: dict[str, Any], file: Path, page: Path, mark: str, make: Callable[[dict[str, Any]], str]) -> None:
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    made = make(found)
    print(made)
    page.write_text(placed([(page, mark, f"\n{made}\n")])[page], encoding="utf-8")
    print(f"Written to {file}; the table of {page} is this now.")
