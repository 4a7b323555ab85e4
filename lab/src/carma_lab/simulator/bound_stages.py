"""Releases and work together: a lower bound of the makespan if no work is done before its release.

Time is divided into stages at some of the releases. The last stage has no end; its length is minimised. In each stage
a GPU spends its seconds on sets of tasks that are released by the end of the stage (so fewer stages are more
optimistic). Work that is not done is left to the next stage. A task is on a GPU for at most the length of the stage.

This is a linear program with a column for each stage and set. As in bound_prices.py it is solved by column generation,
and the result follows from the dual alone, over all sets, so it holds even if the solver stopped early. The dual has a
price for the progress of each kind, which never decreases from stage to stage; a fee for each task on a GPU; and a
rent of a GPU in each stage, which equals the earnings of the best set there after fees. Under a cap on slowdown there
is one more fee for each task on a GPU, equal in all stages, because a kind's member-seconds are for its whole
duration. All of them, at that fee, are subtracted from the value of the work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carma_lab.simulator.bound_prices import alone, solver
from carma_lab.simulator.bound_sets import Floats, Places, Sets, Work

ROUNDS = 25
MORE = 10  # sets added to a stage in a round
NEAR = 1e-3


class Stages(NamedTuple):
    """Rows are kinds, columns stages."""

    at_s: Floats  # start of each stage
    new_gpu_s: Floats
    tasks: Floats  # released by the end of the stage
    pieces: Floats  # the same, times the GPUs of each
    most_gpu_s: Floats | None  # maximum member-seconds of each kind over all stages; None: no limit

    @property
    def lengths_s(self) -> Floats:
        """Lengths of all stages but the last."""
        return np.diff(self.at_s)


def stages_of(work: Work, at_s: Floats, cap: float | None = None) -> Stages:
    """`at_s`: some of the releases, including the first. `cap`: of the slowdown."""
    stage = np.searchsorted(at_s, work.release_s, side="right") - 1
    shape = (len(work.kinds), len(at_s))
    new, tasks, pieces = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(new, (work.kind, stage), work.gpu_s)
    np.add.at(tasks, (work.kind, stage), 1.0)
    np.add.at(pieces, (work.kind, stage), work.gpus)
    return Stages(at_s, new, tasks.cumsum(axis=1), pieces.cumsum(axis=1), work.most_by_kind(cap))


def earliest_end_s(sets: Sets, stages: Stages, gpus: int, first: list[int], enough_s: float) -> float:
    """A lower bound of the makespan. `first`: initial sets. The search ends early if the result cannot exceed
    `enough_s`."""
    master, best_s = _Master(sets, stages, gpus), 0.0
    for stage in range(len(stages.at_s)):
        master.add(stage, [place for place in {*alone(sets), *first} if master.possible[stage][place]])
    for _ in range(ROUNDS):
        dual = master.solve()
        if dual is None:
            break
        rents, better = master.rents(dual)
        best_s = max(best_s, _proven_s(stages, gpus, dual, rents))
        if dual.end_s <= max(enough_s, best_s * (1.0 + NEAR)) or not any(better):
            break
        for stage, places in enumerate(better):
            master.add(stage, places)
    return best_s


class _Dual(NamedTuple):
    end_s: float  # with the sets added so far: perhaps too late
    prices: Floats
    fees: Floats
    rents: Floats
    capped: Floats  # the fee of each kind that is equal in all stages; 0 without a cap


def _proven_s(stages: Stages, gpus: int, dual: _Dual, rents: Floats) -> float:
    """The earliest end by these prices, fees and rents: the value of all work, less the earnings before the last
    stage, divided by the earnings per second of the last stage."""
    a_second = gpus * rents + (dual.fees * stages.pieces).sum(axis=0)
    if a_second[-1] <= 0.0:
        return 0.0
    left = float((dual.prices * stages.new_gpu_s).sum() - a_second[:-1] @ stages.lengths_s)
    if stages.most_gpu_s is not None:
        left -= float(dual.capped @ stages.most_gpu_s)
    return float(stages.at_s[-1]) + max(0.0, left / float(a_second[-1]))


class _Master:
    """The linear program with the columns added so far. Rows: work by kind and stage, GPUs by stage, members by kind
    and stage, and under a cap members by kind. Columns: the length of the last stage, the remaining work by kind and
    stage, and seconds of sets."""

    def __init__(self, sets: Sets, stages: Stages, gpus: int) -> None:
        self._sets, self._stages = sets, stages
        self._kinds, self._count = stages.new_gpu_s.shape
        self.possible = [sets.possible(stages.tasks[:, stage]) for stage in range(self._count)]
        self._method = "highs" if stages.most_gpu_s is None else "highs-ipm"  # much faster with rows over all stages
        self._taken: set[tuple[int, int]] = set()
        work, length = self._kinds * self._count, np.append(stages.lengths_s, 0.0)
        most = [-stages.new_gpu_s.ravel(), gpus * length, (stages.pieces * length).ravel()]
        if stages.most_gpu_s is not None:
            most.append(stages.most_gpu_s)
        self._most = np.concatenate(most)
        self._columns = 1 + self._kinds * (self._count - 1)
        self._entries: list[tuple[NDArray[np.intp], NDArray[np.intp], Floats]] = []
        last = self._row(np.arange(self._kinds), self._count - 1)
        self._put(
            np.append(last + work + self._count, work + self._count - 1), 0, -np.append(stages.pieces[:, -1], gpus)
        )
        for stage in range(self._count - 1):
            rows = self._row(np.arange(self._kinds), stage)
            columns = 1 + stage * self._kinds + np.arange(self._kinds)
            self._put(rows, columns, -np.ones(self._kinds))  # remaining after this stage …
            self._put(rows + 1, columns, np.ones(self._kinds))  # … for the next

    def _row(self, kinds: Places, stage: int) -> Places:
        return np.asarray(kinds * self._count + stage)

    def _put(self, rows: Places, columns: Places | int, values: Floats) -> None:
        self._entries.append((rows, np.broadcast_to(np.asarray(columns, np.intp), rows.shape), values))

    def add(self, stage: int, places: list[int]) -> None:
        fresh = sorted({place for place in places if (place, stage) not in self._taken})
        self._taken.update((place, stage) for place in fresh)
        work = self._kinds * self._count
        columns = self._columns + np.arange(len(fresh))
        members, rates = self._sets.members[fresh], self._sets.rates[fresh]
        one, slot = np.nonzero(members < self._kinds)
        rows = self._row(members[one, slot], stage)
        self._put(rows, columns[one], -rates[one, slot])
        self._put(rows + work + self._count, columns[one], np.ones(len(one)))
        if self._stages.most_gpu_s is not None:
            self._put(members[one, slot] + 2 * work + self._count, columns[one], np.ones(len(one)))
        self._put(np.full(len(fresh), work + stage), columns, np.ones(len(fresh)))
        self._columns += len(fresh)

    def solve(self) -> _Dual | None:
        from scipy.sparse import coo_array  # type: ignore[import-untyped]

        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self._most), self._columns)).tocsr()
        cost = np.zeros(self._columns)
        cost[0] = 1.0
        found = solver()(cost, A_ub=matrix, b_ub=self._most, method=self._method)
        if found.x is None:
            return None
        dual = np.maximum(0.0, -found.ineqlin.marginals)
        shape, work = (self._kinds, self._count), self._kinds * self._count
        members = 2 * work + self._count  # rows before those of the cap
        return _Dual(
            end_s=float(self._stages.at_s[-1] + found.fun),
            prices=np.maximum.accumulate(dual[:work].reshape(shape), axis=1),
            fees=dual[work + self._count : members].reshape(shape),
            rents=dual[work : work + self._count],
            capped=np.zeros(self._kinds) if self._stages.most_gpu_s is None else dual[members:],
        )

    def rents(self, dual: _Dual) -> tuple[Floats, list[list[int]]]:
        """Earnings of the best set in each stage, and the sets that earn more than the solver's rent."""
        rents, better = np.zeros(self._count), []
        for stage, possible in enumerate(self.possible):
            worth = np.where(possible, self._sets.worth(dual.prices[:, stage], dual.fees[:, stage] + dual.capped), 0.0)
            rents[stage] = max(0.0, float(worth.max()))
            best = np.argsort(-worth, kind="stable")[:MORE]
            better.append([int(place) for place in best if worth[place] > dual.rents[stage] * (1.0 + 1e-6) + 1e-12])
        return rents, better
