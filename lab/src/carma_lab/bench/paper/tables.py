"""The published tables with ours beside them, on 4 GPUs: makespan, completion, run time, energy, OOMs, and why."""

from __future__ import annotations

from typing import Any

import msgspec

from carma_lab.bench.paper import workloads
from carma_lab.bench.paper.cases import Case, Ratio, Results, over_traces, ratio
from carma_lab.bench.paper.published import PUBLISHED, Published, why
from carma_lab.bench.paper.variants import ABLATIONS, EXCLUSIVE, FEW_GPUS, MORE, STRICT, Scope, Variant


def groups(scope: Scope) -> list[tuple[str, tuple[Variant, ...]]]:
    """In the order of the page."""
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
    told = {
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
        told |= {
            "published": msgspec.to_builtins(theirs),
            "off": _off(mean, theirs),
            "why": why(variant.name, mean, traces, tasks),
        }
    return told


def _off(mean: Ratio, theirs: Published) -> dict[str, float]:
    """Ours less theirs, of what was published."""
    fields = [name for name in Published.__struct_fields__ if name != "ooms"]
    pairs = {name: (getattr(mean, name), getattr(theirs, name)) for name in fields}
    return {name: ours - other for name, (ours, other) in pairs.items() if ours is not None and other is not None}
