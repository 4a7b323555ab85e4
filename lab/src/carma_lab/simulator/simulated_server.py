"""State of a simulated server: the tasks on each GPU with their speeds and memory, and the power of the cards.

Progress, energy and activity are integrated in closed form whenever the tasks on a GPU change. Memory is allocated in
steps; a step that exceeds the card or the task's cap ends the task. The core must not read this state: it gets samples
(sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from carma.core.model.outcome import Outcome, OutOfMemory, Succeeded
from carma.core.model.values import AttemptKey, Demand, Gpu, GpuId
from carma.core.scheduling.sharing_model import Mechanism, engine_shown, progress_rates
from carma.traces import TraceTask
from carma_lab.simulator.simulated_cards import Card, gpu_of

STEPS = 5  # of memory allocation
IDLE = Demand(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class RunningTask:
    """One attempt since its first use of a GPU."""

    key: AttemptKey
    row: TraceTask
    boards: tuple[SimulatedGpu, ...]
    cap_mib: int | None
    began: float
    done_s: float = 0.0  # of its work, before this attempt
    saving: bool = False  # a saving task holds its memory and does no work on the GPU
    paused: bool = False  # nor does a paused one
    progress_s: float = 0.0
    held_mib: int = 0
    rate: float = 1.0
    busy_s: float = 0.0  # integral of its activity, divided by its demand
    version: int = 0  # of its scheduled step
    steps: float = 0.0  # optimizer steps as last counted, and the progress then
    counted_s: float = 0.0
    demand: Demand = field(init=False)
    working: tuple[SimulatedGpu, ...] = field(init=False)
    plan: list[tuple[float, int]] = field(init=False)  # future steps: (progress, additional MiB); 0 MiB is the end
    grown_at: float = field(init=False)
    since: float = field(init=False)  # time of the last update

    def __post_init__(self) -> None:
        self.demand = self.row.demand
        self.working = self.boards[: self.row.working_gpus]
        self.plan = plan_of(self.row, self.done_s)
        self.grown_at = self.since = self.began

    @property
    def share(self) -> float:
        """Share of its demand that it shows while its memory grows."""
        return 1.0 - (len(self.plan) - 1) / STEPS

    def on(self, board: SimulatedGpu) -> Demand:
        """The task's demand on that GPU: none on a GPU that it requested and does not use."""
        return self.demand if board in self.working and not self.still else IDLE

    @property
    def still(self) -> bool:
        return self.saving or self.paused

    def move(self, now: float) -> None:
        done_s = 0.0 if self.still else self.rate * (now - self.since)
        self.progress_s += done_s
        self.busy_s += done_s * self.share
        self.since = now

    @property
    def next_at(self) -> float:
        return self.since + max(0.0, self.plan[-1][0] - self.progress_s) / self.rate


def plan_of(row: TraceTask, done_s: float = 0.0) -> list[tuple[float, int]]:
    """The steps from the last to the first. They lie within the ramp; the task ends when all its work is done, except
    `done_s`, which was saved."""
    work_s = max(1e-3, row.work_s - done_s)
    ramp_s = min(row.ramp_s, 0.5 * work_s)
    steps = [
        (ramp_s * place / (STEPS - 1), row.memory_mib * (place + 1) // STEPS - row.memory_mib * place // STEPS)
        for place in range(STEPS)
    ]
    return [(work_s, 0), *reversed(steps)]


class Integrals(NamedTuple):
    """Over time: their difference over a span is an exact mean."""

    sm_s: float = 0.0
    occupancy_s: float = 0.0
    dram_s: float = 0.0
    memory_mib_s: float = 0.0
    energy_j: float = 0.0
    engine_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedGpu:
    index: int
    card: Card
    runners: list[RunningTask] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    used_mib: int = 0
    load: Demand = IDLE
    watts: float = field(init=False)
    since: float = 0.0
    sums: Integrals = Integrals()  # at `since`

    def __post_init__(self) -> None:
        self.watts = self.card.idle_w

    def move(self, now: float) -> None:
        if now > self.since:
            self.sums, self.since = self.totals(now), now

    def totals(self, now: float) -> Integrals:
        """Totals up to a time; the state does not change."""
        span_s, load, sums = now - self.since, self.load, self.sums
        return Integrals(
            sums.sm_s + load.sm_active * span_s,
            sums.occupancy_s + load.sm_occupancy * span_s,
            sums.dram_s + load.dram_active * span_s,
            sums.memory_mib_s + self.used_mib * span_s,
            sums.energy_j + self.watts * span_s,
            sums.engine_s + (load.gr_active or 0.0) * span_s,
        )

    def show(self) -> None:
        """Computes the present load. Called after every change of a task on the GPU."""
        sm = occupancy = dram = 0.0
        demands = [runner.on(self) for runner in self.runners]
        parts = [runner.rate * runner.share for runner in self.runners]
        for demand, part in zip(demands, parts, strict=True):
            sm += demand.sm_active * part
            occupancy += demand.sm_occupancy * part
            dram += demand.dram_active * part
        self.load = Demand(min(1.0, sm), min(1.0, occupancy), min(1.0, dram), engine_shown(demands, parts))
        self.watts = self.card.power_w(self.load)


class SimulatedServer:
    """`soon` is called with the time of a runner's next step, and has to call `due` then."""

    def __init__(
        self,
        boards: Sequence[SimulatedGpu],
        mechanism: Mechanism,
        noise: Callable[[Sequence[str], Sequence[float]], Sequence[float]],
        soon: Callable[[float, RunningTask, int], None],
    ) -> None:
        self.boards = boards
        self._mechanism = mechanism
        self._noise = noise
        self._schedule = soon

    def begin(self, runner: RunningTask, now: float) -> Outcome | None:
        for board in runner.boards:
            board.move(now)
            board.runners.append(runner)
        ended = self._take(runner, now)
        if ended is None:
            self._changed(runner.boards, now)
        return ended

    def due(self, runner: RunningTask, now: float) -> Outcome | None:
        """A memory step, or the end. None: the task continues."""
        runner.move(now)
        if len(runner.plan) == 1:
            self.leave(runner, now)
            return Succeeded()
        ended = self._take(runner, now)
        if ended is None:
            for board in runner.boards:
                board.move(now)
                board.show()
            self._schedule_next(runner)
        return ended

    def save(self, runner: RunningTask, now: float) -> None:
        """The task makes no progress and uses no GPU from now until it leaves."""
        runner.move(now)
        runner.saving = True
        self._changed(runner.boards, now)

    def set_paused(self, runner: RunningTask, paused: bool, now: float) -> None:
        runner.move(now)
        runner.paused = paused
        self._changed(runner.boards, now)

    def leave(self, runner: RunningTask, now: float) -> None:
        runner.move(now)
        runner.version += 1
        for board in runner.boards:
            board.move(now)
            board.runners.remove(runner)
            board.used_mib -= runner.held_mib
        self._changed(runner.boards, now)

    def _take(self, runner: RunningTask, now: float) -> Outcome | None:
        """Allocates all steps that are due, on each of its GPUs."""
        while len(runner.plan) > 1 and runner.plan[-1][0] <= runner.progress_s + 1e-9:
            _, more_mib = runner.plan[-1]
            over = runner.cap_mib is not None and runner.held_mib + more_mib > runner.cap_mib
            if over or any(board.used_mib + more_mib > board.card.memory_mib for board in runner.boards):
                self.leave(runner, now)
                return OutOfMemory("gpu", 1, more_mib, runner.held_mib)
            runner.plan.pop()
            runner.held_mib += more_mib
            runner.grown_at = now
            for board in runner.boards:
                board.move(now)
                board.used_mib += more_mib
        return None

    def _changed(self, boards: Iterable[SimulatedGpu], now: float) -> None:
        """Updates the speeds of the tasks on these GPUs, and the loads of all GPUs of these tasks."""
        touched: dict[int, SimulatedGpu] = {}
        moved: dict[AttemptKey, RunningTask] = {}
        for board in boards:
            touched[board.index] = board
            for runner in board.runners:
                moved[runner.key] = runner
                for other in runner.boards:
                    touched[other.index] = other
        for board in touched.values():
            board.move(now)
        for runner in moved.values():
            runner.move(now)
        for board in boards:
            board.rates = self._rates(board)
        for runner in moved.values():
            runner.rate = min(board.rates[board.runners.index(runner)] for board in runner.boards)
            self._schedule_next(runner)
        for board in touched.values():
            board.show()

    def _rates(self, board: SimulatedGpu) -> list[float]:
        """1 for a paused task, which makes no progress: its neighbours run as if it were not there."""
        runners = [runner for runner in board.runners if not runner.paused]
        found = {runner.key: 1.0 for runner in board.runners}
        if len(runners) > 1:
            rates = progress_rates([runner.on(board) for runner in runners], self._mechanism)
            factors = self._noise([runner.row.name for runner in runners], rates)
            for runner, rate, factor in zip(runners, rates, factors, strict=True):
                found[runner.key] = min(1.0, max(1e-3, rate * factor))
        return list(found.values())

    def _schedule_next(self, runner: RunningTask) -> None:
        runner.version += 1
        if not runner.still:
            self._schedule(runner.next_at, runner, runner.version)


def build_gpus(
    card: Card, count: int, named: Sequence[tuple[GpuId, Card]]
) -> tuple[tuple[Gpu, ...], list[SimulatedGpu]]:
    """The GPUs of a server with their simulated states: `count` equal ones, or those of `named`."""
    named = named or [(GpuId(f"GPU-{index:04}"), card) for index in range(count)]
    gpus = tuple(gpu_of(own, gpu, index) for index, (gpu, own) in enumerate(named))
    return gpus, [SimulatedGpu(index, own) for index, (_, own) in enumerate(named)]
