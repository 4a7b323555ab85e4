"""How fast the simulator is, on one core: tasks a second on 64 GPUs, the whole Philly trace, decisions as GPUs grow.

Everything here is measured alone, after all other parts, and in processor seconds; where others work on the machine the
figures are still too low, and the machine's load is in the file.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from carma.traces import Trace
from carma_lab.bench import decisions
from carma_lab.bench.paper import workloads
from carma_lab.bench.paper.cases import Say
from carma_lab.bench.paper.variants import BASELINES, EXCLUSIVE, LARGE, OURS, Scope, Variant
from carma_lab.simulator.request import simulation

LIGHT = 0.8  # of what the GPUs can do one task each: hardly a queue
VARIANTS = (EXCLUSIVE, BASELINES[0], OURS[0], OURS[1])
PUBLISHED_TASKS_PER_S = (0.1, 390.0)  # of other simulators: Pollux's readme; Alibaba PAI's log
REPEATS = 5
CLOCK_EVERY = 256  # events: reading the clock takes time, too


def work(scope: Scope, whole: Trace | None, say: Say) -> dict[str, Any]:
    rates = []
    for load in (LIGHT, workloads.LOAD):
        trace = workloads.generated(scope.speed_tasks, LARGE, scope.seed, load)
        rates += [_timed(variant, trace, LARGE, scope, say) | {"load": load} for variant in VARIANTS]
    told: dict[str, Any] = {"published_tasks_per_s": PUBLISHED_TASKS_PER_S, "rates": rates, "limit_s": scope.limit_s}
    if whole is not None:
        told["philly"] = [_timed(variant, whole, LARGE, scope, say) for variant in VARIANTS]
    say(f"decisions on {', '.join(map(str, scope.growth))} GPUs")
    told["decisions"] = msgspec.to_builtins(list(decisions.growth(REPEATS, scope.growth)))
    return told


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
