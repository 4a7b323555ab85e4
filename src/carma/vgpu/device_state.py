"""What the made-up device remembers, and how it moves through time. No files and no clock here.

`advance` is the heart: progress and energy are integrated in closed form between changes, and a process that reaches
its end on the way stops loading its GPU at that very moment. So results do not depend on who looks how often.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates, shown

FaultKind = Literal["lost", "metrics", "processes"]
VERSION = 1
IDLE = Demand(0.0, 0.0, 0.0)
LEFT_IDLE = Demand(0.0, 0.0, 0.0, 0.0, 0.0)  # wants nothing of a GPU, and is not slowed there


class VirtualGpu(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One GPU. The `*_s` fields are integrals over virtual time: their difference over a span is an exact mean."""

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


class VirtualProcess(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One OS process on one or several GPUs (indices); it holds `memory_mib` on each of them."""

    pid: int
    start_ticks: int  # from /proc: with the pid, the name of a process that is never given twice
    gpus: list[int]
    memory_mib: int
    demand: Demand = IDLE
    working: int = 0  # of `gpus`, the first so many that it works on; the others stand idle; 0: all
    progress_s: float = 0.0  # work done, in seconds of running alone
    wanted_s: float | None = None  # work there is; None: no end
    name: str = ""

    @property
    def done(self) -> bool:
        return self.wanted_s is not None and self.progress_s >= self.wanted_s

    def on(self, index: int) -> Demand:
        """What it wants of that GPU."""
        return self.demand if not self.working or index in self.gpus[: self.working] else LEFT_IDLE


class World(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole state file. Virtual time `at_s` counts from the world's creation."""

    version: int = VERSION
    boot: str  # the kernel's boot id: the monotonic clock and pids mean nothing after a reboot
    origin_s: float  # the machine's monotonic clock at virtual time 0
    epoch_s: float  # seconds since the epoch at virtual time 0
    speed: float = 1.0  # virtual seconds per real second
    shared: bool = False  # files are for every user of the machine (the daemon is root)
    at_s: float = 0.0  # everything is integrated up to here
    gpus: list[VirtualGpu] = []
    processes: list[VirtualProcess] = []

    def virtual_s(self, monotonic_s: float) -> float:
        return (monotonic_s - self.origin_s) * self.speed

    def gpu(self, name: str) -> VirtualGpu | None:
        """By UUID or by index."""
        return next((gpu for gpu in self.gpus if name in (gpu.id, str(gpu.index))), None)

    def process(self, pid: int, start_ticks: int) -> VirtualProcess | None:
        return next((one for one in self.processes if one.pid == pid and one.start_ticks == start_ticks), None)

    def on(self, index: int) -> list[VirtualProcess]:
        return [process for process in self.processes if index in process.gpus]

    def used_mib(self, index: int) -> int:
        return sum(process.memory_mib for process in self.processes if index in process.gpus)


def rates(world: World) -> list[float]:
    """The rate of every process now: at the slowest of its GPUs; 0 on a lost GPU and at its end."""
    found = [0.0 if process.done else 1.0 for process in world.processes]
    for gpu in world.gpus:
        members = [
            place for place, process in enumerate(world.processes) if gpu.index in process.gpus and not process.done
        ]
        if gpu.lost:
            for place in members:
                found[place] = 0.0
        elif len(members) > 1:
            shared = progress_rates([world.processes[place].on(gpu.index) for place in members])
            for place, rate in zip(members, shared, strict=True):
                found[place] = min(found[place], rate)
    return found


def advance(world: World, to_s: float) -> None:
    """Integrate progress and energy up to `to_s`, stopping at each process's end on the way. Time never goes back."""
    while world.at_s < to_s:
        now_rates = rates(world)
        span_s, ending = _next_end(world, now_rates, to_s - world.at_s)
        for gpu in world.gpus:
            _integrate(world, gpu, now_rates, span_s)
        for process, rate in zip(world.processes, now_rates, strict=True):
            process.progress_s += rate * span_s
        for process in ending:  # exactly, so that rounding cannot leave a last step of length zero
            process.progress_s = process.wanted_s or 0.0
        world.at_s = world.at_s + span_s if ending else to_s


def until_change_s(world: World, process: VirtualProcess) -> float | None:
    """Virtual seconds until the first end among the processes that share a GPU with this one, itself included."""
    soonest: float | None = None
    for other, rate in zip(world.processes, rates(world), strict=True):
        if rate > 0.0 and other.wanted_s is not None and not set(other.gpus).isdisjoint(process.gpus):
            left_s = (other.wanted_s - other.progress_s) / rate
            soonest = left_s if soonest is None else min(soonest, left_s)
    return soonest


def power_w(gpu: VirtualGpu, load: Demand) -> float:
    """Power under a load: DRAM traffic weighs three times as much as SM activity, with a falling slope.

    Fitted on the six published means of an A100 40 GB (SM .42 and DRAM .26: 218 W; .64 and .38: 263 W; .77 and .34:
    253 W; ...), which it meets within 14 W.
    """
    busy = min(1.0, 0.25 * load.sm_active + 0.75 * load.dram_active)
    return float(gpu.idle_w + (gpu.peak_w - gpu.idle_w) * busy**0.63)


def coarse_util(demands: list[Demand]) -> float:
    """The misleading figure: the share of time in which any kernel runs. About 0.8 for one task of SM activity 0.4."""
    idle = 1.0
    for demand in demands:
        if demand.sm_active > 0.0:
            idle *= 1.0 - (0.65 + 0.35 * min(1.0, demand.sm_active))
    return 1.0 - idle


def load_now(world: World, gpu: VirtualGpu, now_rates: list[float]) -> tuple[Demand, float]:
    """What the GPU shows at this moment: activity and the coarse utilisation."""
    pairs = [
        (process.on(gpu.index), rate)
        for process, rate in zip(world.processes, now_rates, strict=True)
        if rate > 0.0 and gpu.index in process.gpus
    ]
    if not pairs or gpu.lost:
        return IDLE, 0.0
    demands = [demand for demand, _ in pairs]
    return shown(demands, [rate for _, rate in pairs]), coarse_util(demands)


def _integrate(world: World, gpu: VirtualGpu, now_rates: list[float], span_s: float) -> None:
    if gpu.lost:
        return
    load, util = load_now(world, gpu, now_rates)
    gpu.energy_j += power_w(gpu, load) * span_s
    gpu.sm_active_s += load.sm_active * span_s
    gpu.sm_occupancy_s += load.sm_occupancy * span_s
    gpu.dram_active_s += load.dram_active * span_s
    gpu.gpu_util_s += util * span_s


def _next_end(world: World, now_rates: list[float], span_s: float) -> tuple[float, list[VirtualProcess]]:
    """How far to go, at most `span_s`, and which processes end there."""
    ending: list[VirtualProcess] = []
    for process, rate in zip(world.processes, now_rates, strict=True):
        if rate <= 0.0 or process.wanted_s is None:
            continue
        left_s = (process.wanted_s - process.progress_s) / rate
        if left_s < span_s:
            span_s, ending = left_s, [process]
        elif left_s == span_s:
            ending.append(process)
    return span_s, ending
