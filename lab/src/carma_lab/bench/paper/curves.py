"""goodput's curve: makespan over mean run time as the slowdown cap grows, with the limit at each cap, every baseline's
point and the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from carma.traces import Trace
from carma_lab.bench.paper import workloads
from carma_lab.bench.paper.cases import Case, Limit, Ratio, Results, Row, ratio
from carma_lab.bench.paper.variants import EXCLUSIVE, FEW_GPUS, NO_CAP, Scope, Variant, capped

JUDGED = (1.1, 2.0)  # the caps between which the curve is judged


def work(scope: Scope, results: Results) -> dict[str, Any]:
    return curves(scope, scope.caps, workloads.shipped(scope.traces), results)


def curves(scope: Scope, caps: Sequence[float], traces: Mapping[str, Trace], results: Results) -> dict[str, Any]:
    """Curve, points and limit of each trace on 4 GPUs, and the points above the curve."""
    variants = (EXCLUSIVE, *scope.baselines, scope.ours[0], *(capped(cap) for cap in caps))
    asks = [Case(variant, trace, FEW_GPUS, scope.seed) for trace in traces for variant in variants]
    limits = [Limit(trace, FEW_GPUS, cap) for trace in traces for cap in (None, *(cap for cap in caps if cap < NO_CAP))]
    results.find([*asks, *limits], traces)
    return {
        "gpus": FEW_GPUS,
        "judged_caps": JUDGED,
        "traces": {trace: _one(scope, trace, caps, results) for trace in traces},
    }


def _one(scope: Scope, trace: str, caps: Sequence[float], results: Results) -> dict[str, Any]:
    alone = results.row(Case(EXCLUSIVE, trace, FEW_GPUS, scope.seed))

    def of(variant: Variant) -> Ratio:
        return ratio(results.row(Case(variant, trace, FEW_GPUS, scope.seed)), alone)

    curve = [(cap, of(capped(cap))) for cap in caps]
    points = {variant.name: of(variant) for variant in (*scope.baselines, scope.ours[0])}
    judged = [(one.run, one.makespan) for cap, one in curve if JUDGED[0] <= cap <= JUDGED[1]]
    bound = results.limit(Limit(trace, FEW_GPUS))
    return {
        "tasks": alone.tasks,
        "bound": bound.makespan_s / alone.makespan_s,
        "completion_bound": bound.completion_mean_s / alone.completion_mean_s,
        "curve": [_capped(trace, cap, one, alone, results) for cap, one in curve],
        "points": {name: _point(one) for name, one in points.items()},
        "below": {name: below(judged, (one.run, one.makespan)) for name, one in points.items()},
    }


def _capped(trace: str, cap: float, one: Ratio, alone: Row, results: Results) -> dict[str, Any]:
    """A point of the curve, with the limit of runs that keep to its cap."""
    limit_cap = None if cap >= NO_CAP else cap
    limit_s = results.makespan_limit_s(Limit(trace, FEW_GPUS, limit_cap))
    return {"cap": limit_cap, "bound": limit_s / alone.makespan_s, **_point(one)}


def _point(one: Ratio) -> dict[str, Any]:
    fields = ("run", "makespan", "slowdown", "completion", "completion_p95", "energy", "ooms", "failed")
    return {name: getattr(one, name) for name in fields}


def below(curve: Sequence[tuple[float, float]], point: tuple[float, float]) -> bool | None:
    """Whether the curve lies below a point (run time, makespan): some cap, or the straight line between two, has a
    lower makespan at no more run time. The curve may jump up again after it. None: the point lies left of the curve,
    where there is nothing to compare."""
    run, makespan = point
    reached = [height for at, height in curve if at <= run]
    if not reached:
        return None
    line = sorted(curve)
    crossed = [
        low[1] + (high[1] - low[1]) * (run - low[0]) / (high[0] - low[0])
        for low, high in pairwise(line)
        if low[0] <= run <= high[0] and low[0] < high[0]
    ]
    return min([*reached, *crossed]) < makespan
