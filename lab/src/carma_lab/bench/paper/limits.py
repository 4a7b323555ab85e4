"""Each policy compared with the lower bound of makespan and mean completion, on shipped traces and on Philly."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from carma.traces import Trace
from carma_lab.bench import decisions
from carma_lab.bench.paper import curves, workloads
from carma_lab.bench.paper.cases import Case, Limit, Results, Row, Say, ratio
from carma_lab.bench.paper.variants import (
    BASELINES,
    DEFAULT_CAP,
    EXCLUSIVE,
    FEW_GPUS,
    LARGE,
    NO_CAP,
    OURS,
    Scope,
    Variant,
    capped,
)
from carma_lab.simulator.request import simulation

FEWER = (BASELINES[0], BASELINES[1], BASELINES[7], BASELINES[8], OURS[0], OURS[1], capped(NO_CAP))  # of many GPUs


def policies(scope: Scope) -> tuple[Variant, ...]:
    return (*scope.baselines, *scope.ours[:2], capped(NO_CAP))


def work(scope: Scope, results: Results) -> dict[str, Any]:
    traces, groups = workloads.simulated(scope)
    places = [(trace, gpus) for gpus, names in groups for trace in names]
    return {"rows": beside(places, policies(scope), traces, scope.seed, results)}


def philly(scope: Scope, results: Results, whole: Trace) -> dict[str, Any]:
    """Windows of the public Philly trace, on each number of GPUs, with the limit; goodput's curve on four GPUs.

    The public file is not part of this project. Jobs become tasks by class shares (carma_lab/traces/philly.py). Run
    times are the tasks', because a job of several days would be the makespan of a whole window under any policy.
    """
    result: dict[str, Any] = {"load": workloads.LOAD, "windows": scope.windows, "trace": whole.source or whole.name}
    sizes = []
    for gpus, tasks in scope.window_tasks:
        traces = workloads.windows(whole, scope.windows, tasks, gpus, scope.seed)
        compared = FEWER if gpus >= LARGE else policies(scope)
        rows = beside([(name, gpus) for name in traces], compared, traces, scope.seed, results)
        sizes.append({"gpus": gpus, "tasks": tasks, "rows": rows})
        if gpus == FEW_GPUS:
            result["curves"] = curves.curves(scope, scope.window_caps, traces, results)
    return {**result, "sizes": sizes}


def beside(
    places: list[tuple[str, int]],
    compared: tuple[Variant, ...],
    traces: dict[str, Trace],
    seed: int,
    results: Results,
) -> list[dict[str, Any]]:
    """Each policy on each trace and number of GPUs, with the limit; and with the limit at its cap for goodput."""
    cases = [Case(variant, trace, gpus, seed) for trace, gpus in places for variant in (EXCLUSIVE, *compared)]
    results.find([*cases, *(Limit(*place, cap) for place in places for cap in (None, DEFAULT_CAP))], traces)
    return [_row(trace, gpus, compared, seed, results) for trace, gpus in places]


def _row(trace: str, gpus: int, compared: tuple[Variant, ...], seed: int, results: Results) -> dict[str, Any]:
    alone = results.row(Case(EXCLUSIVE, trace, gpus, seed))
    limit = results.limit(Limit(trace, gpus))
    found = {variant.name: results.row(Case(variant, trace, gpus, seed)) for variant in compared}
    return {
        "trace": trace,
        "gpus": gpus,
        "tasks": alone.tasks,
        "exclusive_s": alone.makespan_s,
        "exclusive_completion_s": alone.completion_mean_s,
        "bound_s": msgspec.to_builtins(limit),
        "bound": limit.makespan_s / alone.makespan_s,
        "arrivals": limit.arrivals_s / alone.makespan_s,
        "completion_bound": limit.completion_mean_s / alone.completion_mean_s,
        "capped": _capped(alone, Limit(trace, gpus, DEFAULT_CAP), seed, results),
        "policies": {
            name: {
                **msgspec.to_builtins(ratio(row, alone)),
                "over_bound": row.makespan_s / limit.makespan_s,
                "completion_over_bound": row.completion_mean_s / limit.completion_mean_s,
            }
            for name, row in found.items()
        },
    }


def _capped(alone: Row, limit: Limit, seed: int, results: Results) -> dict[str, Any]:
    """goodput compared with the limit of runs within its cap, which does not apply if `slowdown_max` exceeds it."""
    row = results.row(Case(capped(DEFAULT_CAP), limit.trace, limit.gpus, seed))
    limit_s = results.makespan_limit_s(limit)
    return {
        "cap": limit.cap,
        "bound": limit_s / alone.makespan_s,
        "over_bound": row.makespan_s / limit_s,
        "slowdown_max": row.slowdown_max,
    }


LIGHT = 0.8  # of what the GPUs can do one task each: hardly a queue
VARIANTS = (EXCLUSIVE, BASELINES[0], OURS[0], OURS[1])
PUBLISHED_TASKS_PER_S = (0.1, 390.0)  # of other simulators: Pollux's readme; Alibaba PAI's log
REPEATS = 5
CLOCK_EVERY = 256  # events: reading the clock takes time, too


def speed(scope: Scope, whole: Trace | None, say: Say) -> dict[str, Any]:
    rates = []
    for load in (LIGHT, workloads.LOAD):
        trace = workloads.generated(scope.speed_tasks, LARGE, scope.seed, load)
        rates += [_timed(variant, trace, LARGE, scope, say) | {"load": load} for variant in VARIANTS]
    result: dict[str, Any] = {"published_tasks_per_s": PUBLISHED_TASKS_PER_S, "rates": rates, "limit_s": scope.limit_s}
    if whole is not None:
        result["philly"] = [_timed(variant, whole, LARGE, scope, say) for variant in VARIANTS]
    say(f"decisions on {', '.join(map(str, scope.growth))} GPUs")
    result["decisions"] = msgspec.to_builtins(list(decisions.growth(REPEATS, scope.growth)))
    return result


def _timed(variant: Variant, trace: Trace, gpus: int, scope: Scope, say: Say) -> dict[str, Any]:
    """Broken off at the limit: then `done` is below `tasks`, and tasks a second are of what was done."""
    made = simulation(variant.request(trace.name, gpus, scope.seed, 0.0), trace)
    began = time.process_time()
    for number, _ in enumerate(made.events()):
        if number % CLOCK_EVERY == 0 and time.process_time() - began > scope.limit_s:
            break
    took_s = time.process_time() - began
    done = len(made.runs)
    say(f"speed, {len(trace.tasks):,} tasks on {gpus} GPUs: {variant.name}, {done / max(took_s, 1e-9):,.0f} a second")
    return {
        "variant": variant.name, "trace": trace.name, "tasks": len(trace.tasks), "gpus": gpus, "done": done,
        "took_s": took_s, "tasks_per_s": done / max(took_s, 1e-9), "whole": done == len(trace.tasks),
    }  # fmt: skip
