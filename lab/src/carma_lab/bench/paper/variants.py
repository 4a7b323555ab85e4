"""Who is compared: the published schedulers and rules as settings of `carma simulate`, and goodput.

The baselines have CARMA's gate (0.80, 0.45 and 0.40), a GPU alone after an OOM, and nothing that holds a task to its
booking, but this project's queue, which lets tasks overtake: they are better with it, and goodput is compared with
them. STRICT are the same in the strict order of arrival and with no limit of tasks on a GPU, for the comparison with
what was published. The ablations change one thing of a baseline each.
"""

from __future__ import annotations

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


def gate(sm_active: float, sm_occupancy: float, dram_active: float) -> Settings:
    caps = (("gate.sm_active", sm_active), ("gate.sm_occupancy", sm_occupancy), ("gate.dram_active", dram_active))
    return (*caps, ("gate.combine", "published"))


def with_set(settings: Settings, name: str, value: object) -> Settings:
    return (*(pair for pair in settings if pair[0] != name), (name, value))


CARMA, AEGIS, CAREFUL = gate(0.8, 0.45, 0.4), gate(0.65, 0.35, 0.5), gate(0.5, 0.2, 0.4)
ALONE: Settings = (("recovery.mode", "alone"), ("sharing.caps", False))
AS_PUBLISHED: Settings = (*CARMA, *ALONE)
GATE_OFF = with_set(AS_PUBLISHED, "gate.enabled", False)
LADDER = with_set(AS_PUBLISHED, "recovery.mode", "ladder")
IN_ORDER: Settings = (("queue.backfill_depth", 0), ("placement.tasks_per_gpu", 16))  # more than ever came together
NONE_IS_ALL: Settings = (("memory.unknown_mib", 40_000),)

EXCLUSIVE = Variant("exclusive", "exclusive", demand="none")
BASELINES = (
    Variant("MAGM, memory measured", "magm", "measured", "none", AS_PUBLISHED),
    Variant("MAGM, no estimate", "magm", "none", "none", AS_PUBLISHED),
    Variant("MAGM, Horus's memory", "magm", "horus", "none", AS_PUBLISHED),
    Variant("MAGM, GPUMemNet's memory", "magm", "gpumemnet", "none", AS_PUBLISHED),
    Variant("MAGM, Fake Tensor's memory", "magm", "faketensor", "none", AS_PUBLISHED),
    Variant("LUG, no estimate", "lug", "none", "none", AS_PUBLISHED),
    Variant("RR, no estimate", "round-robin", "none", "none", GATE_OFF),
    Variant("Horus", "horus"),
    Variant("Lucid", "lucid"),
)
ABLATIONS = (
    Variant("MAGM, no estimate, gate off", "magm", "none", "none", GATE_OFF),
    Variant("LUG, no estimate, gate off", "lug", "none", "none", GATE_OFF),
    Variant("MAGM, memory measured, gate off", "magm", "measured", "none", GATE_OFF),
    Variant("MAGM, memory measured, gate .65/.35/.50", "magm", "measured", "none", (*AEGIS, *ALONE), "AEGIS's gate"),
    Variant("MAGM, memory measured, gate .50/.20/.40", "magm", "measured", "none", (*CAREFUL, *ALONE),
            "the gate that AEGIS recommends"),
    Variant("MAGM, no estimate, ladder", "magm", "none", "none", LADDER, "after an OOM a larger booking, then alone"),
    Variant("MAGM, Horus's memory, ladder", "magm", "horus", "none", LADDER,
            "after an OOM a larger booking, then alone"),
)  # fmt: skip
# As near to the published rules as settings go: the first of the queue holds up all others, as many share a GPU as fit,
# and 40,000 MiB, which stood for "no estimate" in the published task files, kept a GPU for the task alone.
STRICT = tuple(
    one._replace(settings=(*one.settings, *IN_ORDER, *(() if one.memory in ("measured", "none") else NONE_IS_ALL)))
    for one in (*BASELINES, *ABLATIONS[:2])
)
OURS = (
    Variant(
        "MAGM, our defaults", "magm", demand="history", about="the server's default policy; run times from history"
    ),
    Variant("goodput", "goodput", about="demands known beforehand"),
    Variant("goodput, history", "goodput", demand="history", about="demands only from earlier runs in the trace"),
    Variant(
        "goodput, estimate",
        "goodput",
        demand="estimate",
        about="demands from earlier runs, of new commands with a trial run's measured errors",
    ),
    Variant("goodput, seen", "goodput", demand="none", about="demands only from what is seen"),
    Variant("goodput, trial run", "goodput", "trace", about="memory with the trial run's measured errors"),
)

DEFAULTS = OURS[0]
MORE = (
    *(DEFAULTS._replace(name=f"MAGM, our defaults, {told}", memory=memory, about="") for memory, told in (
        ("trace", "trial run's memory"), ("none", "no estimate"), ("horus", "Horus's memory"),
        ("gpumemnet", "GPUMemNet's memory"), ("faketensor", "Fake Tensor's memory"))),
    DEFAULTS._replace(name="MAGM, our defaults, back alone", memory="none", about="no estimate",
                      settings=(("recovery.mode", "alone"),)),
    DEFAULTS._replace(name="MAGM, our defaults, time slices", about="", mechanism="timeslice"),
    Variant("MAGM, trial run's memory", "magm", "trace", "none", AS_PUBLISHED),
    Variant("Horus, history", "horus", demand="history", about="demands only from earlier runs in the trace"),
    Variant("Lucid, history", "lucid", demand="history", about="demands only from earlier runs in the trace"),
)  # fmt: skip


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
