"""The twenty tasks of the trial: light to heavy, each so many steps of one workload, and what its user says it needs.

Steps and memory are what a user would write down for such a task, chosen near lab/results/h200 so that one runs 3 to 12
seconds alone on an H200. Three users say nothing about memory. `Virtual` is the same task for a virtual GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

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


SHAPES: tuple[Shape, ...] = (
    Shape("resnet18-cifar-b32", 950, 1536, Virtual(8, 1024, 0.10, 0.01)),
    Shape("vgg16-224-b32", 190, None, Virtual(5, 7168, 0.92, 0.37)),
    Shape("encoder-256x4-b32", 680, 2560, Virtual(6, 2048, 0.49, 0.08)),
    Shape("resnet50-224-b32-cpu40", 160, 5120, Virtual(10, 4608, 0.22, 0.10)),
    Shape("mlp-512x4-b256", 4540, 1536, Virtual(12, 1024, 0.04, 0.00)),
    Shape("resnet50-224-b64-bf16", 170, 5632, Virtual(5, 5120, 0.77, 0.23)),
    Shape("lstm-512x2-b64", 1020, None, Virtual(9, 1024, 0.13, 0.02)),
    Shape("swin-t-224-b32-bf16", 150, 4608, Virtual(7, 4096, 0.29, 0.10)),
    Shape("embeddings-12x200k", 700, 3584, Virtual(4, 3072, 0.40, 0.22)),
    Shape("densenet121-224-b32", 120, 6656, Virtual(6, 6144, 0.40, 0.15)),
    Shape("mobilenet-cifar-b64", 650, 1536, Virtual(10, 1024, 0.09, 0.00)),
    Shape("encoder-768x12-b16-bf16", 200, 5120, Virtual(6, 4608, 0.32, 0.11)),
    Shape("mlp-4096x6-b512", 400, 3072, Virtual(3, 2560, 0.91, 0.14)),
    Shape("efficientnet-cifar-b128", 310, None, Virtual(9, 1024, 0.14, 0.01)),
    Shape("vit-b16-224-b32-bf16", 190, 5120, Virtual(6, 4608, 0.45, 0.18)),
    Shape("resnet34-cifar-b128-cpu10", 460, 1536, Virtual(11, 1024, 0.09, 0.01)),
    Shape("mobilenet-224-b64", 150, 7680, Virtual(4, 7168, 0.70, 0.24)),
    Shape("resnet18-cifar-b128", 860, 1536, Virtual(7, 1024, 0.14, 0.02)),
    Shape("encoder-1024x8-b8-bf16", 240, 5120, Virtual(5, 4608, 0.47, 0.19)),
    Shape("resnet18-224-b32", 510, 3072, Virtual(4, 2560, 0.66, 0.21)),
)
BY_WORKLOAD = {shape.workload: shape for shape in SHAPES}


def training(shape: Shape, *, virtual: bool, scale: float = 1.0) -> Work:
    """That task, for so many steps; `scale` makes it shorter or longer."""
    if virtual:
        made_up = shape.virtual
        steps = max(1, round(made_up.seconds * scale / VirtualCard.STEP_S))
    else:
        steps = max(1, round(shape.steps * scale))
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
