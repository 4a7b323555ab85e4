"""Ten windows of the public Philly trace, on 4, 8 and 64 GPUs, with the limit; goodput's curve on 4 GPUs.

The public file is not part of this project. Jobs become tasks by class shares (carma_lab/traces/philly.py); run times
are the
tasks', since with the jobs' own one of several days would be the makespan of a whole window under any policy.
"""

from __future__ import annotations

from typing import Any

from carma.traces import Trace
from carma_lab.bench.paper import curves, limits, workloads
from carma_lab.bench.paper.cases import Results
from carma_lab.bench.paper.scope import FEW_GPUS, LARGE, Scope
from carma_lab.bench.paper.variants import BASELINES, NO_CAP, OURS, capped

FEWER = (BASELINES[0], BASELINES[1], BASELINES[7], BASELINES[8], OURS[0], OURS[1], capped(NO_CAP))  # of many GPUs


def work(scope: Scope, results: Results, whole: Trace) -> dict[str, Any]:
    told: dict[str, Any] = {"load": workloads.LOAD, "windows": scope.windows, "trace": whole.source or whole.name}
    sizes = []
    for gpus, tasks in scope.window_tasks:
        traces = workloads.windows(whole, scope.windows, tasks, gpus, scope.seed)
        policies = FEWER if gpus >= LARGE else limits.policies(scope)
        rows = limits.beside([(name, gpus) for name in traces], policies, traces, scope.seed, results)
        sizes.append({"gpus": gpus, "tasks": tasks, "rows": rows})
        if gpus == FEW_GPUS:
            told["curves"] = curves.curves(scope, scope.window_caps, traces, results)
    return {**told, "sizes": sizes}
