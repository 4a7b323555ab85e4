"""How much is simulated: all of it, or enough of it to see that it works."""

from __future__ import annotations

from carma.core.model.values import Record
from carma.traces import SHIPPED
from carma_lab.bench.paper.variants import BASELINES, DEFAULT_CAP, NO_CAP, OURS, Variant

PARTS = ("tables", "curves", "limits", "seeds", "philly", "speed")
FEW_GPUS = 4  # of the published server
LARGE = 64  # GPUs, from which on fewer cases are simulated


class Scope(Record, frozen=True, kw_only=True):
    quick: bool = False
    seed: int = 0
    traces: tuple[str, ...] = SHIPPED
    baselines: tuple[Variant, ...] = BASELINES
    ours: tuple[Variant, ...] = OURS
    gpus: tuple[int, ...] = (4, 8)  # for the shipped traces
    caps: tuple[float, ...] = (1.02, 1.05, 1.1, 1.15, 1.2, DEFAULT_CAP, 1.3, 1.4, 1.5, 1.75, 2.0, NO_CAP)
    seeds: int = 20
    windows: int = 10
    window_tasks: tuple[tuple[int, int], ...] = ((4, 150), (8, 200), (64, 600))  # GPUs, tasks
    window_caps: tuple[float, ...] = (1.1, DEFAULT_CAP, 1.5, 2.0, NO_CAP)  # with 4 GPUs only
    large_tasks: int = 600  # of the generated trace for 64 GPUs
    speed_tasks: int = 4000
    growth: tuple[int, ...] = (8, 64, 512, 4_096, 8_192)  # GPUs
    limit_s: float = 120.0  # of one simulation whose speed is taken; then it is broken off, and the file says so


QUICK = Scope(
    quick=True,
    traces=("t1",),
    baselines=(BASELINES[0], BASELINES[8]),
    ours=OURS[:2],
    gpus=(4,),
    caps=(1.1, DEFAULT_CAP, NO_CAP),
    seeds=2,
    windows=2,
    window_tasks=((4, 40),),
    window_caps=(DEFAULT_CAP,),
    large_tasks=40,
    speed_tasks=200,
    growth=(8,),
    limit_s=3.0,
)


def generated_name(gpus: int) -> str:
    return f"generated-{gpus}"
