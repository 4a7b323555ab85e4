"""Prices of a second of work under which no set of tasks earns more than 1 per second of a GPU.

With such prices a GPU does priced work at a speed of at most 1, for any set. The priced work of any tasks divided by
the number of GPUs is therefore a lower bound of their time. The best prices are the dual solution of a linear program:
the minimum GPU-seconds for all work, over all mixes of sets. It is solved by column generation: with few sets first,
then with sets that earn more than 1. The prices are scaled by the earnings of the best of ALL sets, so the bound holds
even if the solver stopped early or is inexact.

A cap on slowdown limits the member-seconds of each kind (bound_sets.py). In the dual this is a fee for each
member-second. No set earns more than 1 per second after fees, so the GPU-seconds are at least all priced work less the
fees on the maximum member-seconds. The same holds for any subset of the tasks and its member-seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from carma.errors import Refused
from carma_lab.simulator.bound_sets import Floats, Sets, Work

ROUNDS = 60
MORE = 200  # sets added in a round
NEAR = 1e-4  # relative distance from the optimum at which the search stops


def solver() -> Any:
    """linprog of scipy; Refused if scipy is not installed."""
    try:
        from scipy.optimize import linprog  # type: ignore[import-untyped]
    except ImportError as error:
        raise Refused("scipy is not installed, so lower bounds cannot be computed", "pip install scipy") from error
    return linprog


class Priced(NamedTuple):
    """Prices and fees of each kind, in GPU-seconds."""

    prices: Floats  # for a second of progress
    fees: Floats | None = None  # for a member-second; None: no cap

    def least_gpu_s(self, work: Work, cap: float | None) -> Floats:
        """Each task's part of the minimum GPU-seconds. It is 0 if the fees exceed the value of the work: leaving a task
        out keeps the bound valid."""
        priced: Floats = self.prices[work.kind] * work.gpu_s
        if cap is None or self.fees is None:
            return priced
        return np.maximum(0.0, priced - self.fees[work.kind] * work.most_gpu_s(cap))


def prices(sets: Sets, gpu_s: Floats, pool: set[int], most_gpu_s: Floats | None = None) -> tuple[Priced, list[int]]:
    """Best prices for this work of each kind and these member-seconds, and the sets used. `pool` grows."""
    linprog, kinds = solver(), len(gpu_s)
    pool.update(alone(sets))
    best, best_s, used = Priced(np.zeros(kinds)), -1.0, list[int]()
    for _ in range(ROUNDS):
        places = sorted(pool)
        rows, most = -sets.progress(places, kinds), -gpu_s
        if most_gpu_s is not None:
            rows, most = np.vstack((rows, sets.counts(places, kinds))), np.append(most, most_gpu_s)
        found = linprog(np.ones(len(places)), A_ub=rows, b_ub=most, method="highs")
        if found.x is None:
            break
        dual = np.maximum(0.0, -found.ineqlin.marginals)
        asked, fees = dual[:kinds], None if most_gpu_s is None else dual[kinds:]
        worth = sets.worth(asked, fees)
        top = float(worth.max())
        if top <= 0.0:
            break
        used = [places[at] for at in np.flatnonzero(found.x > 1e-9)]
        earned = float(asked @ gpu_s) if most_gpu_s is None else float(dual @ -most)
        if earned / top > best_s:
            best, best_s = Priced(asked / top, None if fees is None else fees / top), earned / top
        if found.fun <= best_s * (1.0 + NEAR):
            break
        pool.update(int(place) for place in np.argsort(-worth, kind="stable")[:MORE])
    return best, used


def alone(sets: Sets) -> list[int]:
    """The sets of one task."""
    kinds = sets.members.max() if sets.members.shape[1] > 1 else np.inf
    return [int(place) for place in np.flatnonzero((sets.members[:, 1:] == kinds).all(axis=1))]
