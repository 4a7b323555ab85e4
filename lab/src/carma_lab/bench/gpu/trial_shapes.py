"""The twenty tasks of the trial: light to heavy, each a number of steps of one workload, with its declared memory.

Steps and memory are what a user would write down for such a task, chosen near lab/results/h200 so that one runs 3 to 12
seconds alone on an H200. Three users say nothing about memory. `Virtual` is the same task for a virtual GPU.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma_lab.bench.gpu.trial_server import Work
from carma_lab.bench.gpu.trial_task import VirtualCard


class Virtual(NamedTuple):
    seconds: float  # alone
    memory_mib: int
    sm: float
    dram: float


class Shape(NamedTuple):
    workload: str
    steps: int
    declared_mib: int | None
    virtual: Virtual


class Solo(NamedTuple):
    """A task alone on the GPU: steps a second, and the SM activity that it shows."""

    rate: float
    sm_active: float


def _shapes() -> Iterator[Shape]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for workload, steps, declared_mib, *virtual in list(csv.reader(file))[1:]:
            yield msgspec.convert((workload, steps, declared_mib or None, virtual), Shape, strict=False)


SHAPES = tuple(_shapes())
BY_WORKLOAD = {shape.workload: shape for shape in SHAPES}


def training(shape: Shape, *, virtual: bool, scale: float = 1.0) -> Work:
    """The task of a shape; `scale` is the factor of its duration."""
    steps = max(1, round((shape.virtual.seconds / VirtualCard.STEP_S if virtual else shape.steps) * scale))
    return Work(
        name=shape.workload,
        arguments=("train", "--steps", str(steps), *drawn(shape, virtual=virtual)),
        gpu_memory_mib=shape.declared_mib,
    )


def drawn(shape: Shape, *, virtual: bool) -> tuple[str, ...]:
    """The arguments that say what is trained."""
    if not virtual:
        return ("--workload", shape.workload)
    made_up = shape.virtual
    return (
        *("--memory-mib", str(made_up.memory_mib)),
        *("--sm", f"{made_up.sm:g}"),
        *("--dram", f"{made_up.dram:g}"),
    )


def solos(table: str, *, virtual: bool) -> dict[str, Solo]:
    """Each task alone, by `carma bench interference` (its JSON file); of a virtual one it is known exactly."""
    if virtual:
        return {shape.workload: Solo(1 / VirtualCard.STEP_S, shape.virtual.sm) for shape in SHAPES}
    path = Path(table)
    if not table or not path.is_file():
        return {}
    found: dict[str, Solo] = {}
    for row in json.loads(path.read_text())["rows"]:
        if len(row["tasks"]) == 1 and row["percent"] == [100] and row["sm_active"] is not None:
            found.setdefault(row["tasks"][0], Solo(row["rates"][0], row["sm_active"]))
    return found
