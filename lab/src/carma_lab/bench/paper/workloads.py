"""The traces of the study: those that are shipped, windows of Philly, and generated ones. Same seed, same traces.

Windows and generated traces are sped up or slowed down until their work is LOAD times what the GPUs could do, one task
on each, while tasks still arrive: there is a queue, as in the published traces (1.9 to 4.2 there).
"""

from __future__ import annotations

import random
from pathlib import Path

from msgspec.structs import replace

from carma.errors import Usage
from carma.traces import Trace, find, read
from carma.traces.reader import lines_of
from carma.traces.table import shipped_table
from carma_lab.bench.paper.variants import LARGE, Scope
from carma_lab.traces.generate import Recipe, generate
from carma_lab.traces.philly import MapRules, Window, import_philly
from carma_lab.traces.transform import scale

LOAD = 2.0
GPUS_MOST = 4  # of a Philly job that is taken


def shipped(names: tuple[str, ...]) -> dict[str, Trace]:
    return {name: find(name) for name in names}


def simulated(scope: Scope) -> tuple[dict[str, Trace], list[tuple[int, tuple[str, ...]]]]:
    """The traces, and for each number of GPUs the names of those that are simulated on it."""
    traces, places = shipped(scope.traces), [(gpus, scope.traces) for gpus in scope.gpus]
    if not scope.quick:
        name = f"generated-{LARGE}"
        traces[name] = generated(scope.large_tasks, LARGE, scope.seed)
        places.append((LARGE, (name,)))
    return traces, places


def generated(tasks: int, gpus: int, seed: int, load: float = LOAD) -> Trace:
    made = generate(Recipe(tasks=tasks, rate_per_hour=60.0, seed=seed), shipped_table())
    return at_load(made, gpus, load)


def at_load(trace: Trace, gpus: int, load: float) -> Trace:
    """Arrivals at the rate at which work comes `load` times as fast as the GPUs do it."""
    span_s = trace.tasks[-1].arrival_s
    if span_s <= 0:
        raise Usage(f"{trace.name}: all tasks arrive at once", "Give a trace whose tasks arrive one after the other.")
    return scale(trace, rate=load * gpus * span_s / trace.gpu_seconds)


def philly(path: Path, gpus_most: int = GPUS_MOST, seed: int = 0) -> Trace:
    """The public file, or a trace that `carma trace import philly` made of it."""
    lines = lines_of(path, "Give the path of the Philly CSV file.")
    head = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    if "arrival_s" not in head:
        rules = MapRules(durations="task", seed=seed)
        return import_philly(path, Window(gpus_most=gpus_most), rules, shipped_table()).trace
    kept = tuple(task for task in read(path).tasks if task.gpus <= gpus_most)
    if not kept:
        raise Usage(f"{path}: no task that fits on {gpus_most} GPUs", "Import the window with fewer GPUs.")
    return Trace(name=path.name, tasks=kept)


def windows(whole: Trace, count: int, tasks: int, gpus: int, seed: int) -> dict[str, Trace]:
    """One from each of `count` equal parts of the trace, so that they do not overlap. Where it begins in its part is
    drawn."""
    part = len(whole.tasks) // count
    if part < tasks:
        raise Usage(
            f"{whole.name} has {len(whole.tasks):,} tasks; {count} windows of {tasks} are wanted",
            "Give the whole public file, or import more of it.",
        )
    dice = random.Random(seed)
    found = {}
    for place in range(count):
        begin = place * part + dice.randint(0, part - tasks)
        cut = Trace(name=whole.name, tasks=whole.tasks[begin : begin + tasks], source=whole.source)
        found[f"philly-{place + 1}-{gpus}"] = at_load(_from_zero(cut), gpus, LOAD)
    return found


def _from_zero(trace: Trace) -> Trace:
    first = trace.tasks[0].arrival_s
    moved = tuple(replace(task, arrival_s=round(task.arrival_s - first, 3)) for task in trace.tasks)
    return Trace(name=trace.name, tasks=moved, source=trace.source)
