"""Effect of predicted demands on the policy goodput, simulated, and the tables of docs/goodput.md about them.

Called by `python -m lab.tools.fit_demand`; by itself it makes the tables again from lab/results/gpumemnet/demand.json:

    python -m lab.tools.demand_tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from carma.core.model.values import Demand
from carma.traces import TraceTask
from carma.traces.table import SHIPPED
from carma_lab.simulator.estimate_sources import odds_of, predict_demand, share_of
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.simulation import Demands
from tools.markdown import filled, table

RESULTS, PAGE = Path("lab/results/gpumemnet/demand.json"), Path("docs/goodput.md")
SEEDS = 6
CAUTIONS = (0.0, 0.2, 0.4, 0.7)  # added to the log-odds of engine activity and power
FIGURES = {
    "sm_active": "SM activity",
    "sm_occupancy": "SM occupancy",
    "dram_active": "DRAM",
    "gr_active": "any kernel",
    "power": "power",
}
WHO = {"predicted": "predicted", "by_size": "by its size", "mean": "the mean of all"}
KNOWN: dict[Demands, str] = {
    "measured": "all, and run times",
    "estimate": "predicted for new commands, seen for others",
    "history": "seen, of commands that ran before",
    "none": "nothing",
}


def simulated() -> dict[str, Any]:
    """Makespans over those of exclusive GPUs, with measured memory; random results are means over seeds."""
    alone = {name: _figures(name, "exclusive", "none").makespan_s for name in SHIPPED}
    found: dict[str, Any] = {"seeds": SEEDS, "traces": list(SHIPPED)}
    for known in KNOWN:
        found[known] = _over(alone, known, SEEDS if known == "estimate" else 1)
    found["magm"] = _over(alone, "history", 1, policy="magm")
    cautious = {}
    for caution in CAUTIONS:
        with patch("carma_lab.simulator.task_knowledge.predict_demand", _raised(caution)):
            cautious[f"{caution:g}"] = _over(alone, "estimate", SEEDS)
    return {**found, "cautious": cautious}


def _over(alone: Mapping[str, float], known: Demands, seeds: int, policy: str = "goodput") -> dict[str, Any]:
    runs = {name: [_figures(name, policy, known, seed) for seed in range(seeds)] for name in alone}
    ratios = {name: fmean(run.makespan_s for run in each) / alone[name] for name, each in runs.items()}
    every = [run for each in runs.values() for run in each]
    return {
        **{name: round(ratio, 3) for name, ratio in ratios.items()},
        "makespan": round(exp(fmean(map(log, ratios.values()))), 3),
        "slowdown_mean": round(fmean(run.slowdown_mean for run in every), 3),
        "slowdown_p95": round(fmean(run.slowdown_p95 for run in every), 3),
        "slowdown_most": round(max(run.slowdown_max for run in every), 3),
    }


def _figures(trace: str, policy: str, known: Demands, seed: int = 0) -> Any:
    return simulation(Request(trace=trace, policy=policy, gpus=4, demand=known, seed=seed)).run()


def _raised(caution: float) -> Callable[[int, TraceTask], Demand]:
    def raised(seed: int, row: TraceTask) -> Demand:
        one = predict_demand(seed, row)
        assert one.gr_active is not None
        assert one.power is not None
        engine, power = (share_of(odds_of(share) + caution) for share in (one.gr_active, one.power))
        return Demand(one.sm_active, one.sm_occupancy, one.dram_active, engine, power)

    return raised


def errors_table(found: Mapping[str, Any]) -> str:
    people = found["models_that_people_use"]
    parts = {
        "shapes that the fit has not seen": found["shapes_left_out"],
        "families that the fit has not seen": found["families_left_out"],
        "models that people use": people["all"],
        "of them, the published tasks": people["trace"],
    }
    titles = ["runs", "", "demands", *FIGURES.values(), "speeds of pairs"]
    rows = [
        [name if who == "predicted" else "", f"{part['runs']:,}" if who == "predicted" else "", word]
        + [f"{part['error'][who][figure]:.3f}" for figure in FIGURES]
        + [f"{part['pairs'][who]['error']:.3f}"]
        for name, part in parts.items()
        for who, word in WHO.items()
    ]
    return table(titles, rows)


def simulated_table(found: Mapping[str, Any]) -> str:
    sim = found["simulated"]
    names = sim["traces"]
    known = {f"`goodput`: {word}": sim[name] for name, word in KNOWN.items()}
    known[f"`magm`: {KNOWN['history']}"] = sim["magm"]
    rows = []
    for word, one in known.items():
        ends = (f"{one['makespan']:.3f}", f"{one['slowdown_p95']:.2f}", f"{one['slowdown_most']:.2f}")
        rows.append([word, *(f"{one[name]:.2f}" for name in names), *ends])
    return table(["knows", *(f"`{name}`" for name in names), "all", "slowdown of one in 20", "most"], rows)


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    for name, made in (("demand-errors", errors_table(found)), ("demand-simulated", simulated_table(found))):
        text = filled(text, name, f"\n{made}\n")
    return text


def main() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
