"""What the manager sees: samples of GPUs, as a sampler takes them every few seconds. Never the truth itself.

A sample holds means since the one before it, as GPM's figures are. While nothing on a GPU changes, its samples would
all be alike; they are left out, and begin again with the next change. A rule that counts the age of a sample must allow
for that (`rules_for` in setup.py). Nor is a GPU looked at more often than it takes where nobody could tell (heed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor

from carma.core.model.events import GpusSampled
from carma.core.model.values import Activity, Gpu, GpuId, GpuSample, ProcessUse
from carma.core.state import State
from carma_lab.simulator.simulated_server import Board, Runner


def heeded(state: State, gpu: GpuId, used: bool) -> bool:
    """Whether the core could do something else for a sample that shows the same tasks on the GPU as the last one.
    `used`: whether that showed any."""
    rules = state.rules
    if rules.sharing.watchdog or rules.preemption.enabled:
        return True  # then samples end tasks, or move them
    if not state.policy.shares:
        return False  # nobody comes before the one that is there has left
    # Those on it settle, and what they show, or do not show yet, is at the gate. One that nobody is on is idle,
    # whatever its window says.
    return used or bool(state.on_gpu.get(gpu))


Sums = tuple[float, float, float, float, float, float]  # as of when, and what a board had summed up by then


class Eyes:
    def __init__(
        self,
        gpus: Sequence[Gpu],
        boards: Sequence[Board],
        period_s: float,
        quiet_s: float,
        *,
        wake: Callable[[float], None],
        heeded: Callable[[GpuId, bool], bool],
    ) -> None:
        self._gpus, self._boards = gpus, boards
        self._period_s, self._quiet_s = period_s, quiet_s
        self._wake = wake  # told when the next look is due
        self._heeded = heeded  # whether one more sample that shows the same tasks (or nobody) could make a difference
        self._until: dict[int, float] = {}  # boards that are looked at, each until then
        self._last: dict[int, Sums] = {}
        self._showed: list[list[Runner] | None] = [None] * len(boards)  # whom the last sample of each showed
        self._due = False
        self.looked_at = 0.0
        self.unseen: list[GpuSample] = []  # that nobody was shown yet, in the order of time

    def changed(self, boards: Iterable[Board], now: float) -> None:
        """Something came to these GPUs, left them or grew on them."""
        for board in boards:
            if board.index not in self._until:
                self._last[board.index] = self._integrals(board, now)
            self._until[board.index] = now + self._quiet_s
        if not self._due and self._until:
            self._due = True
            self._wake((floor(now / self._period_s) + 1) * self._period_s)

    def look(self, now: float) -> None:
        """Take the samples that are due now; the next look is asked for if there is anything left to see."""
        last = self._last
        for index in sorted(self._until):
            # What changed at this very moment is seen in the next look: there is no span yet to take a mean over.
            if last[index][0] < now:
                self._look_at(index, now)
        self._until = {index: until for index, until in self._until.items() if until > now}
        self.looked_at, self._due = now, bool(self._until)
        if self._due:
            self._wake(now + self._period_s)

    def shown(self, now: float) -> GpusSampled:
        samples, self.unseen = tuple(self.unseen), []
        return GpusSampled(now, samples)

    def _look_at(self, index: int, now: float) -> None:
        """A sample, where somebody came or left, where it is the last one, and where it could make a difference."""
        board = self._boards[index]
        news = board.runners != self._showed[index] or self._until[index] <= now
        if news or self._heeded(self._gpus[index].id, bool(board.runners)):
            self._showed[index] = board.runners.copy()
            self.unseen.append(self._sample(index, now))
        elif board.runners:
            board.move(now)  # the next sample has the mean since the one that was shown
        else:
            self._last[index] = self._integrals(board, now)

    def _integrals(self, board: Board, now: float) -> Sums:
        board.move(now)
        return now, board.sm_s, board.occupancy_s, board.dram_s, board.engine_s, board.energy_j

    def _sample(self, index: int, now: float) -> GpuSample:
        board = self._boards[index]
        at, sm_s, occupancy_s, dram_s, engine_s, energy_j = self._last[index]
        self._last[index] = self._integrals(board, now)
        span_s = now - at
        if board.uses is None:
            board.uses = tuple([use_of(runner, board) for runner in board.runners])
        return GpuSample(
            gpu=self._gpus[index].id,
            at=now,
            memory_used_mib=board.used_mib,
            activity=Activity(
                sm_active=(board.sm_s - sm_s) / span_s,
                sm_occupancy=(board.occupancy_s - occupancy_s) / span_s,
                dram_active=(board.dram_s - dram_s) / span_s,
                gr_active=(board.engine_s - engine_s) / span_s,
            ),
            power_w=(board.energy_j - energy_j) / span_s,
            energy_j=board.energy_j,
            processes=board.uses,
        )


def use_of(runner: Runner, board: Board) -> ProcessUse:
    key = runner.key
    sm_active = runner.on(board).sm_active * runner.rate * runner.share
    return ProcessUse(pid=key.task, memory_mib=runner.held_mib, sm_active=sm_active, attempt=key)
