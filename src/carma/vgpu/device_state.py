"""The state of the virtual GPUs, and its change over time. Uses no files and no clock.

`advance` integrates progress and energy in closed form between changes. A process that reaches its end stops loading
its GPU at exactly that moment. So results do not depend on how often the state is read.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates, shown

FaultKind = Literal["lost", "metrics", "processes"]
VERSION = 1
IDLE = Demand(0.0, 0.0, 0.0)
UNUSED = Demand(0.0, 0.0, 0.0, 0.0, 0.0)  # of a GPU that its process does not use, and that does not slow it


class VirtualGpu(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One GPU. The `*_s` fields are integrals over virtual time: their differences give exact means of a span."""

    id: str
    index: int
    name: str
    memory_mib: int
    idle_w: float = 55.0
    peak_w: float = 400.0
    energy_j: float = 0.0
    sm_active_s: float = 0.0
    sm_occupancy_s: float = 0.0
    dram_active_s: float = 0.0
    gpu_util_s: float = 0.0
    faults: list[FaultKind] = []

    @property
    def lost(self) -> bool:
        return "lost" in self.faults


class VirtualProcess(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One OS process on one or several GPUs (indices); it holds `memory_mib` on each of them.

    Fields with default values are not written: running tasks of an older version refuse those that they do not know.
    """

    pid: int
    start_ticks: int  # from /proc: pid and start time identify a process for good
    gpus: list[int]
    memory_mib: int
    demand: Demand = IDLE
    working: int = 0  # number of its GPUs that do work, the first ones; the others idle; 0: all
    progress_s: float = 0.0  # work done, in seconds of running alone
    wanted_s: float | None = None  # all of its work; None: without an end
    name: str = ""
    paused: bool = False  # it stands still

    @property
    def done(self) -> bool:
        return self.wanted_s is not None and self.progress_s >= self.wanted_s

    def on(self, index: int) -> Demand:
        """The process's demand on that GPU."""
        return self.demand if not self.working or index in self.gpus[: self.working] else UNUSED


class VirtualWorld(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole state file. Virtual time `at_s` counts from the world's creation."""

    version: int = VERSION
    boot: str  # the kernel's boot id: the monotonic clock and pids mean nothing after a reboot
    origin_s: float  # the machine's monotonic clock at virtual time 0
    epoch_s: float  # seconds since the epoch at virtual time 0
    speed: float = 1.0  # virtual seconds per real second
    shared: bool = False  # the files are accessible to every user of the machine (the daemon is root)
    at_s: float = 0.0  # everything is integrated up to this time
    gpus: list[VirtualGpu] = []
    processes: list[VirtualProcess] = []

    def virtual_s(self, monotonic_s: float) -> float:
        return (monotonic_s - self.origin_s) * self.speed

    def gpu(self, name: str) -> VirtualGpu | None:
        """The GPU with that UUID or index."""
        return next((gpu for gpu in self.gpus if name in (gpu.id, str(gpu.index))), None)

    def process(self, pid: int, start_ticks: int) -> VirtualProcess | None:
        return next((one for one in self.processes if one.pid == pid and one.start_ticks == start_ticks), None)

    def on(self, index: int) -> list[VirtualProcess]:
        return [process for process in self.processes if index in process.gpus]

    def used_mib(self, index: int) -> int:
        return sum(process.memory_mib for process in self.processes if index in process.gpus)


Progress = list[tuple[VirtualProcess, float]]


def progress(world: VirtualWorld) -> Progress:
    """Every process with its rate now: that of the slowest of its GPUs; 0 on a lost GPU, in a pause and at its end."""
    rates = {id(process): 0.0 if process.done or process.paused else 1.0 for process in world.processes}
    for gpu in world.gpus:
        members = [process for process in world.on(gpu.index) if not process.done and not process.paused]
        if gpu.lost:
            rates |= dict.fromkeys(map(id, members), 0.0)
        elif len(members) > 1:
            shared = progress_rates([process.on(gpu.index) for process in members])
            for process, rate in zip(members, shared, strict=True):
                rates[id(process)] = min(rates[id(process)], rate)
    return [(process, rates[id(process)]) for process in world.processes]


def advance(world: VirtualWorld, to_s: float) -> None:
    """Integrate progress and energy up to `to_s`, stopping at the end of each process. Time never goes back."""
    while world.at_s < to_s:
        moving = progress(world)
        span_s, ending = _next_end(moving, to_s - world.at_s)
        for gpu in world.gpus:
            _integrate(gpu, moving, span_s)
        for process, rate in moving:
            process.progress_s += rate * span_s
        for process in ending:  # exactly, so that rounding cannot leave a last step of length zero
            process.progress_s = process.wanted_s or 0.0
        world.at_s = world.at_s + span_s if ending else to_s


def until_change_s(world: VirtualWorld, process: VirtualProcess) -> float | None:
    """Virtual seconds until the first end among the processes that share a GPU with this one, itself included."""
    others = [(other, rate) for other, rate in progress(world) if not set(other.gpus).isdisjoint(process.gpus)]
    span_s, ending = _next_end(others, float("inf"))
    return span_s if ending else None


def power_w(gpu: VirtualGpu, load: Demand) -> float:
    """Power under a load: DRAM traffic weighs three times as much as SM activity, with a falling slope.

    Fitted on the six published means of an A100 40 GB (SM .42 and DRAM .26: 218 W; .64 and .38: 263 W; .77 and .34:
    253 W; ...), within 14 W.
    """
    busy = min(1.0, 0.25 * load.sm_active + 0.75 * load.dram_active)
    return float(gpu.idle_w + (gpu.peak_w - gpu.idle_w) * busy**0.63)


def coarse_util(demands: list[Demand]) -> float:
    """The coarse utilisation: the share of time in which any kernel runs. About 0.8 for one task of SM activity 0.4."""
    idle = 1.0
    for demand in demands:
        if demand.sm_active > 0.0:
            idle *= 1.0 - (0.65 + 0.35 * min(1.0, demand.sm_active))
    return 1.0 - idle


def load_now(gpu: VirtualGpu, moving: Progress) -> tuple[Demand, float]:
    """The activity and the coarse utilisation of the GPU at this moment."""
    pairs = [(process.on(gpu.index), rate) for process, rate in moving if rate > 0.0 and gpu.index in process.gpus]
    if not pairs or gpu.lost:
        return IDLE, 0.0
    demands = [demand for demand, _ in pairs]
    return shown(demands, [rate for _, rate in pairs]), coarse_util(demands)


def _integrate(gpu: VirtualGpu, moving: Progress, span_s: float) -> None:
    if gpu.lost:
        return
    load, util = load_now(gpu, moving)
    gpu.energy_j += power_w(gpu, load) * span_s
    gpu.sm_active_s += load.sm_active * span_s
    gpu.sm_occupancy_s += load.sm_occupancy * span_s
    gpu.dram_active_s += load.dram_active * span_s
    gpu.gpu_util_s += util * span_s


def _next_end(moving: Progress, span_s: float) -> tuple[float, list[VirtualProcess]]:
    """The time until the next end, at most `span_s`, and the processes that end then."""
    ending: list[VirtualProcess] = []
    for process, rate in moving:
        if rate <= 0.0 or process.wanted_s is None:
            continue
        left_s = (process.wanted_s - process.progress_s) / rate
        if left_s < span_s:
            span_s, ending = left_s, [process]
        elif left_s == span_s:
            ending.append(process)
    return span_s, ending
