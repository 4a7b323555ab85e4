"""The band: true rates differ from the sharing model by its measured error, drawn for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carma_lab.bench.paper import workloads
from carma_lab.bench.paper.cases import Case, Ratio, Results, geo_mean, ratio
from carma_lab.bench.paper.variants import (
    BASELINES,
    EXCLUSIVE,
    FEW_GPUS,
    NO_CAP,
    OURS,
    Scope,
    Variant,
    capped,
)
from carma_lab.runs.figures import mean, quantile

NOISE = 1.0
COMPARED = (BASELINES[0], BASELINES[1], BASELINES[7], BASELINES[8])
ON_MORE = (OURS[1],)  # with more GPUs than were published


def work(scope: Scope, results: Results) -> dict[str, Any]:
    traces, places = workloads.simulated(scope)
    few = (*(one for one in COMPARED if one in scope.baselines), OURS[1], capped(NO_CAP))
    groups = [(gpus, names, few if gpus == FEW_GPUS else ON_MORE) for gpus, names in places]
    seeds = range(scope.seed, scope.seed + scope.seeds)
    noisy = [
        Case(variant, trace, gpus, seed, NOISE)
        for gpus, names, variants in groups
        for variant in variants
        for trace in names
        for seed in seeds
    ]
    plain = [Case(EXCLUSIVE, trace, gpus, scope.seed) for gpus, names, _ in groups for trace in names]
    results.find([*plain, *noisy], traces)
    bands = [_group(scope, gpus, names, variants, seeds, results) for gpus, names, variants in groups]
    return {"noise": NOISE, "seeds": scope.seeds, "groups": bands}


def _group(
    scope: Scope, gpus: int, traces: tuple[str, ...], variants: tuple[Variant, ...], seeds: range, results: Results
) -> dict[str, Any]:
    """Exclusive GPUs share nothing, so they need no seeds."""
    alone = {trace: results.row(Case(EXCLUSIVE, trace, gpus, scope.seed)) for trace in traces}
    by_variant = {}
    for variant in variants:
        found = {
            trace: [ratio(results.row(Case(variant, trace, gpus, seed, NOISE)), alone[trace]) for seed in seeds]
            for trace in traces
        }
        overall = [_over([found[trace][place] for trace in traces]) for place in range(len(seeds))]
        by_variant[variant.name] = {
            "traces": {trace: _bands(ratios) for trace, ratios in found.items()},
            "mean": {"makespan": _band([one[0] for one in overall]), "slowdown": _band([one[1] for one in overall]),
                     "ooms": sum(one.ooms for ratios in found.values() for one in ratios)},
        }  # fmt: skip
    return {"gpus": gpus, "traces": list(traces), "variants": by_variant}


def _over(ratios: Sequence[Ratio]) -> tuple[float, float]:
    """Makespan and slowdown of one seed over all traces."""
    makespan, slowdown = geo_mean([one.makespan for one in ratios]), geo_mean([one.slowdown for one in ratios])
    assert makespan is not None
    return makespan, slowdown if slowdown is not None else float("nan")


def _bands(ratios: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "makespan": _band([one.makespan for one in ratios]),
        "slowdown": _band([one.slowdown for one in ratios if one.slowdown is not None]),
        "completion": _band([one.completion for one in ratios]),
        "ooms": sum(one.ooms for one in ratios),
    }


def _band(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": mean(values), "least": min(values), "p05": quantile(values, 0.05), "p95": quantile(values, 0.95),
        "most": max(values),
    }  # fmt: skip
