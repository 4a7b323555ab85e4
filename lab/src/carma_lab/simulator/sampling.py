"""Samples of simulated GPUs, the only information about them that the core gets.

1. A sample has means since the previous one, as the figures of GPM.
2. While nothing changes on a GPU, its samples would be equal and are left out. Rules that use the age of a sample are
   adapted (`rules_for` in setup.py).
3. Samples that cannot change a decision are left out too (`sample_matters`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor

from carma.core.model.events import GpusSampled
from carma.core.model.values import Activity, Gpu, GpuId, GpuSample, ProcessUse
from carma.core.state import State
from carma_lab.simulator.simulated_server import Integrals, RunningTask, SimulatedGpu


def sample_matters(state: State, gpu: GpuId, used: bool) -> bool:
    """Whether a sample with the same tasks on the GPU as the last one could change a decision.

    It uses only what the core knows. `used`: whether the last sample showed any task.
    """
    rules = state.rules
    if rules.sharing.watchdog or rules.preemption.enabled:
        return True  # samples can end or move tasks
    if not state.policy.shares:
        return False  # no task joins before the present one has left
    # Tasks on the GPU settle, and the gate uses their activity. A GPU without tasks is idle whatever its window says.
    return used or bool(state.on_gpu.get(gpu))


class SimulatedSampler:
    def __init__(
        self,
        gpus: Sequence[Gpu],
        boards: Sequence[SimulatedGpu],
        period_s: float,
        quiet_s: float,
        *,
        wake: Callable[[float], None],
        sample_matters: Callable[[GpuId, bool], bool],
    ) -> None:
        self._gpus, self._boards = gpus, boards
        self._period_s, self._quiet_s = period_s, quiet_s
        self._wake = wake  # called with the time of the next sample
        self._sample_matters = sample_matters
        self._until: dict[int, float] = {}  # GPUs that are sampled, with the end of the sampling
        self._last: dict[int, tuple[float, Integrals]] = {}  # time, and the integrals of a board at that time
        self._sampled: list[list[RunningTask] | None] = [None] * len(boards)  # tasks in the last sample of each GPU
        self._due = False
        self.sampled_at = 0.0
        self.unreported: list[GpuSample] = []  # not yet passed to the core, in the order of time

    def changed(self, boards: Iterable[SimulatedGpu], now: float) -> None:
        """A task came to these GPUs, left them or grew on them."""
        for board in boards:
            if board.index not in self._until:
                self._last[board.index] = self._integrals(board, now)
            self._until[board.index] = now + self._quiet_s
        if not self._due and self._until:
            self._due = True
            self._wake((floor(now / self._period_s) + 1) * self._period_s)

    def sample(self, now: float) -> None:
        """Takes the samples that are due now, and schedules the next ones if any GPU still changes."""
        last = self._last
        for index in sorted(self._until):
            # A change at this moment is sampled next time: there is no period for a mean yet.
            if last[index][0] < now:
                self._sample_gpu(index, now)
        self._until = {index: until for index, until in self._until.items() if until > now}
        self.sampled_at, self._due = now, bool(self._until)
        if self._due:
            self._wake(now + self._period_s)

    def report(self, now: float) -> GpusSampled:
        samples, self.unreported = tuple(self.unreported), []
        return GpusSampled(now, samples)

    def _sample_gpu(self, index: int, now: float) -> None:
        """Takes a sample if a task came or left, if it is the last one, or if it could change a decision."""
        board = self._boards[index]
        changed = board.runners != self._sampled[index] or self._until[index] <= now
        if changed or self._sample_matters(self._gpus[index].id, bool(board.runners)):
            self._sampled[index] = board.runners.copy()
            self.unreported.append(self._sample(index, now))
        elif board.runners:
            board.move(now)  # the next sample has the mean since the last reported one
        else:
            self._last[index] = self._integrals(board, now)

    def _integrals(self, board: SimulatedGpu, now: float) -> tuple[float, Integrals]:
        board.move(now)
        return now, board.sums

    def _sample(self, index: int, now: float) -> GpuSample:
        board = self._boards[index]
        at, then = self._last[index]
        self._last[index] = self._integrals(board, now)
        means = Integrals(*((new - old) / (now - at) for new, old in zip(board.sums, then, strict=True)))
        if board.uses is None:
            board.uses = tuple([use_of(runner, board) for runner in board.runners])
        return GpuSample(
            gpu=self._gpus[index].id,
            at=now,
            memory_used_mib=board.used_mib,
            activity=Activity(
                sm_active=means.sm_s,
                sm_occupancy=means.occupancy_s,
                dram_active=means.dram_s,
                gr_active=means.engine_s,
            ),
            power_w=means.energy_j,
            energy_j=board.sums.energy_j,
            processes=board.uses,
        )


def use_of(runner: RunningTask, board: SimulatedGpu) -> ProcessUse:
    key = runner.key
    sm_active = runner.on(board).sm_active * runner.rate * runner.share
    return ProcessUse(pid=key.task, memory_mib=runner.held_mib, sm_active=sm_active, attempt=key)
