"""The compared variants: the published schedulers and rules as settings of `carma simulate`, and goodput.

The baselines have CARMA's gate (0.80, 0.45 and 0.40), a GPU alone after an OOM, and nothing that holds a task to its
booking, but this project's queue, which lets tasks overtake: they are better with it, and goodput is compared with
them. STRICT are the same in the strict order of arrival and with no limit of tasks on a GPU, for the comparison with
what was published. The ablations change one thing of a baseline each.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from carma.core.model.settings import PlacementRules
from carma.core.model.values import Record
from carma.traces import SHIPPED
from carma_lab.simulator.request import Request
from carma_lab.simulator.simulation import Demands

PARTS = ("tables", "curves", "limits", "seeds", "philly", "speed")
FEW_GPUS = 4  # of the published server
LARGE = 64  # GPUs, from which on fewer cases are simulated
Settings = tuple[tuple[str, object], ...]
NO_CAP = 1e9
DEFAULT_CAP = PlacementRules().slowdown_cap


class Variant(NamedTuple):
    """One way to run a trace. `about` says what it shows, where its name does not."""

    name: str
    policy: str
    memory: str = "measured"
    demand: Demands = "measured"
    settings: Settings = ()
    about: str = ""
    mechanism: Literal["mps", "timeslice"] = "mps"

    def request(self, trace: str, gpus: int, seed: int, noise: float) -> Request:
        return Request(
            trace=trace, policy=self.policy, gpus=gpus, memory=self.memory, demand=self.demand, seed=seed, noise=noise,
            settings=dict(self.settings), mechanism=self.mechanism,
        )  # fmt: skip


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
IN_ORDER: Settings = (("queue.backfill_depth", 0), ("placement.tasks_per_gpu", 16))  # more than ever came together
NONE_IS_ALL: Settings = (("memory.unknown_mib", 40_000),)


def _group(name: str) -> tuple[Variant, ...]:
    settings = {key: tuple(table.items()) for key, table in TABLE["settings"].items()}
    return tuple(Variant(**(row | {"settings": settings.get(row.get("settings"), ())})) for row in TABLE[name])


EXCLUSIVE = Variant("exclusive", "exclusive", demand="none")
BASELINES, ABLATIONS, OURS, MORE = map(_group, ("baselines", "ablations", "ours", "more"))
# As near to the published rules as settings go: the first of the queue holds up all others, as many share a GPU as fit,
# and 40,000 MiB, which stood for "no estimate" in the published task files, kept a GPU for the task alone.
STRICT = tuple(
    one._replace(settings=(*one.settings, *IN_ORDER, *(() if one.memory in ("measured", "none") else NONE_IS_ALL)))
    for one in (*BASELINES, *ABLATIONS[:2])
)


def capped(cap: float) -> Variant:
    """goodput with that cap; the default cap has its plain name, so that it is simulated once."""
    if cap == DEFAULT_CAP:
        return OURS[1]
    name = "goodput, no cap" if cap >= NO_CAP else f"goodput, cap {cap:g}"
    return Variant(name, "goodput", settings=(("placement.slowdown_cap", cap),))


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
