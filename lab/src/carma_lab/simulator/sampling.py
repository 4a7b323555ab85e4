"""Samples of simulated GPUs, the only information about them that the core gets.

1. A sample has means since the previous one, as the figures of GPM.
2. While nothing changes on a GPU, its samples would be equal and are left out. Rules that use the age of a sample are
   adapted (`rules_for` in setup.py).
3. Optimizer steps are counted when the tasks on a GPU have settled, and some times in the minute after that. The rate
   that they show is the true one with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, floor

from carma.core.model.events import AttemptSteps, GpusSampled, StepsCounted
from carma.core.model.values import NO_ACTIVITY, Activity, Gpu, GpuSample, ProcessUse
from carma_lab.simulator.estimate_sources import random_for
from carma_lab.simulator.simulated_server import Integrals, RunningTask, SimulatedGpu

STEPS_PER_S = 10.0  # of every task alone
STEP_ERROR = 0.05  # of the rate between two counts; the same group measured twice on an H200 differs by 0.09 (logs)
COUNTS_S = (0.0, 10.0, 30.0)  # after the samples of a change


class StepCounter:
    """Counts the steps of the tasks on GPUs that changed. `wake` is called with a GPU and the time of its next count,
    and has to call `count` then."""

    def __init__(self, quiet_s: float, noise: float, seed: int, wake: Callable[[float, SimulatedGpu], None]) -> None:
        """`noise`: as in `Setup`; without it, counts are exact too."""
        self._quiet_s, self._wake = quiet_s, wake
        self._error = STEP_ERROR * min(1.0, noise)
        self._random = random_for(seed, "steps")
        self._next: dict[int, tuple[float, int]] = {}  # by GPU: the time of its next count, and its place in COUNTS_S

    def changed(self, boards: Iterable[SimulatedGpu], now: float, at_once: bool = False) -> None:
        """`at_once`: the tasks need not settle, because one of them stands still or goes on."""
        for board in boards:
            self._plan(board, now + (0.0 if at_once else self._quiet_s), 0)

    def _plan(self, board: SimulatedGpu, at: float, place: int) -> None:
        self._next[board.index] = at, place
        self._wake(at, board)

    def count(self, board: SimulatedGpu, now: float) -> StepsCounted | None:
        at, place = self._next[board.index]
        if now != at:  # it has changed meanwhile
            return None
        if place + 1 < len(COUNTS_S) and board.runners:
            self._plan(board, now + COUNTS_S[place + 1] - COUNTS_S[place], place + 1)
        counts = tuple(AttemptSteps(one.key, self._steps(one, now), now) for one in board.runners if not one.still)
        return StepsCounted(now, counts) if counts else None

    def _steps(self, runner: RunningTask, now: float) -> int:
        progress_s = runner.progress_s + runner.rate * (now - runner.since)
        made = STEPS_PER_S * (progress_s - runner.counted_s) * exp(self._random.gauss(0.0, self._error))
        runner.counted_s, runner.steps = progress_s, runner.steps + made
        return int(runner.steps)


class SimulatedSampler:
    def __init__(
        self,
        gpus: Sequence[Gpu],
        boards: Sequence[SimulatedGpu],
        period_s: float,
        quiet_s: float,
        wake: Callable[[float], None],
        measured: bool = True,
    ) -> None:
        self._gpus, self._boards = gpus, boards
        self._period_s, self._quiet_s = period_s, quiet_s
        self._measured = measured
        self._wake = wake  # called with the time of the next sample
        self._until: dict[int, float] = {}  # GPUs that are sampled, with the end of the sampling
        self._last: dict[int, tuple[float, Integrals]] = {}  # time, and the integrals of a board at that time
        self._due = False

    def changed(self, boards: Iterable[SimulatedGpu], now: float) -> None:
        """A task came to these GPUs, left them or grew on them."""
        for board in boards:
            if board.index not in self._until:
                self._last[board.index] = self._integrals(board, now)
            self._until[board.index] = now + self._quiet_s
        if not self._due and self._until:
            self._due = True
            self._wake((floor(now / self._period_s) + 1) * self._period_s)

    def sample(self, now: float) -> GpusSampled | None:
        """The samples that are due now. Schedules the next ones if any GPU still changes."""
        # A change at this moment is sampled next time: there is no period for a mean yet.
        samples = tuple(self._sample(index, now) for index in sorted(self._until) if self._last[index][0] < now)
        self._until = {index: until for index, until in self._until.items() if until > now}
        self._due = bool(self._until)
        if self._due:
            self._wake(now + self._period_s)
        return GpusSampled(now, samples) if samples else None

    def _integrals(self, board: SimulatedGpu, now: float) -> tuple[float, Integrals]:
        board.move(now)
        return now, board.sums

    def _sample(self, index: int, now: float) -> GpuSample:
        board = self._boards[index]
        at, then = self._last[index]
        self._last[index] = self._integrals(board, now)
        means = Integrals(*((new - old) / (now - at) for new, old in zip(board.sums, then, strict=True)))
        return GpuSample(
            gpu=self._gpus[index].id,
            at=now,
            memory_used_mib=board.used_mib,
            activity=_activity(means) if self._measured else NO_ACTIVITY,
            gpu_util=means.engine_s,
            power_w=means.energy_j,
            energy_j=board.sums.energy_j,
            processes=tuple([use_of(runner, board, self._measured) for runner in board.runners]),
        )


def _activity(means: Integrals) -> Activity:
    return Activity(
        sm_active=means.sm_s, sm_occupancy=means.occupancy_s, dram_active=means.dram_s, gr_active=means.engine_s
    )


def use_of(runner: RunningTask, board: SimulatedGpu, measured: bool = True) -> ProcessUse:
    """`measured`: whether the activity of each process is known."""
    key = runner.key
    sm_active = runner.on(board).sm_active * runner.rate * runner.share if measured else None
    return ProcessUse(pid=key.task, memory_mib=runner.held_mib, sm_active=sm_active, attempt=key)
