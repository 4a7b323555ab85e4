"""The published tables with ours beside them, on 4 GPUs: makespan, completion, run time, energy, OOMs, and why.

Source: GitHub ehsanyousefzadehasl/AEGIS, its reports final_representative_evaluation_analysis,
estimator_sensitivity_analysis, or_placement_sensitivity, runtime_pressure_threshold_ablation and
dcgmi_resource_energy_evidence. Three traces of 60 tasks each (Philly, Saturn, Venus), 4 x A100 40 GB, one run of each;
exclusive GPUs = 1, geometric means over the traces, OOMs of all 180 tasks. None: not published.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Record
from carma_lab.bench.paper import workloads
from carma_lab.bench.paper.cases import Case, Ratio, Results, over_traces, ratio
from carma_lab.bench.paper.variants import ABLATIONS, EXCLUSIVE, FEW_GPUS, MORE, STRICT, Scope, Variant

NEAR = 0.03  # of the makespan of exclusive GPUs
MANY = 5  # OOMs
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OF_ALL: str = TABLE["of_all"]
SOURCE: str = TABLE["source"]
TASKS = 180
ENERGY = (0.85, 0.88)  # 12 to 15 % less than with exclusive GPUs
RUN = (1.45, 1.79)  # mean run time of the MAGM variants
ARRIVALS = {"t1": 0.59, "t2": 0.63, "mix": 0.37, "heavy": 0.33}  # the bound by arrivals alone, derived from the traces


class Published(Record, frozen=True, kw_only=True):
    makespan: float
    completion: float | None = None
    completion_p95: float | None = None
    wait: float | None = None
    run: float | None = None
    energy: float | None = None
    ooms: int | None = None


PUBLISHED = msgspec.convert(TABLE["published"], dict[str, Published])


def groups(scope: Scope) -> list[tuple[str, tuple[Variant, ...]]]:
    """Groups in the order of the page."""
    plain = [("baselines", scope.baselines), ("ours", scope.ours)]
    return plain if scope.quick else [("published", STRICT), *plain, ("ablations", ABLATIONS), ("more", MORE)]


def work(scope: Scope, results: Results) -> dict[str, Any]:
    shown = groups(scope)
    variants = [variant for _, of_group in shown for variant in of_group]
    cases = [Case(variant, trace, FEW_GPUS, scope.seed) for variant in (EXCLUSIVE, *variants) for trace in scope.traces]
    results.find(cases, workloads.shipped(scope.traces))
    alone = {trace: results.row(Case(EXCLUSIVE, trace, FEW_GPUS, scope.seed)) for trace in scope.traces}

    def ratios(variant: Variant) -> dict[str, Ratio]:
        return {name: ratio(results.row(Case(variant, name, FEW_GPUS, scope.seed)), row) for name, row in alone.items()}

    tasks = sum(row.tasks for row in alone.values())
    return {
        "gpus": FEW_GPUS,
        "tasks": tasks,
        "exclusive": {trace: msgspec.to_builtins(row) for trace, row in alone.items()},
        "variants": [_told(one, group, ratios(one), tasks) for group, of_group in shown for one in of_group],
    }


def _told(variant: Variant, group: str, traces: dict[str, Ratio], tasks: int) -> dict[str, Any]:
    mean, theirs = over_traces(traces.values()), PUBLISHED.get(variant.name) if group == "published" else None
    parts = {
        "name": variant.name,
        "group": group,
        "about": variant.about,
        "policy": variant.policy,
        "memory": variant.memory,
        "demand": variant.demand,
        "mechanism": variant.mechanism,
        "settings": dict(variant.settings),
        "traces": {name: msgspec.to_builtins(one) for name, one in traces.items()},
        "mean": msgspec.to_builtins(mean),
    }
    if theirs is not None:
        parts |= {
            "published": msgspec.to_builtins(theirs),
            "off": _off(mean, theirs),
            "why": why(variant.name, mean, traces, tasks),
        }
    return parts


def _off(mean: Ratio, theirs: Published) -> dict[str, float]:
    """Ours less theirs, of what was published."""
    fields = [name for name in Published.__struct_fields__ if name != "ooms"]
    pairs = {name: (getattr(mean, name), getattr(theirs, name)) for name in fields}
    return {name: ours - other for name, (ours, other) in pairs.items() if ours is not None and other is not None}


def why(name: str, mean: Ratio, traces: Mapping[str, Ratio], tasks: int) -> str:
    theirs = PUBLISHED[name]
    parts = []
    if abs(mean.makespan - theirs.makespan) > NEAR:
        heavy = traces["heavy"].makespan if "heavy" in traces else mean.makespan
        parts.append(TABLE["reasons"].get(name, "not known").format(heavy=heavy))
    expected = None if theirs.ooms is None else theirs.ooms * tasks / TASKS
    if expected is not None and abs(mean.ooms - expected) >= MANY:
        parts.append(f"OOMs: {mean.ooms} in {tasks} tasks, {expected:.0f} would be as many as theirs; not known")
    return "; ".join(parts)
