"""What a second of work is worth: prices under which no set of tasks earns more than 1 in a second of a GPU.

A GPU then does priced work at a speed of at most 1, whatever it holds. So the priced work of any tasks, over the
number of GPUs, is a time that no policy can beat. The best prices come out of a linear program: the fewest GPU-seconds
in which all work can be done, over all mixes of sets (its dual). It is solved with few sets at first; those that earn
too much are added. The prices are scaled by what the best of ALL sets earns, so that what is said holds whether or not
the solver got to the end, and however exact it is.

Under a cap on slowdown each kind has only so many member-seconds (bound_sets.py). In the dual that is a fee for each of
them. No set earns more than 1 in a second after fees, so that the GPU-seconds are at least all priced work, less the
fees on all member-seconds that there may be. That holds for any of the tasks by themselves, with what those may have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from carma.errors import Refused
from carma_lab.simulator.bound_sets import Floats, Sets, Work

ROUNDS = 60
MORE = 200  # sets that are added in a round
NEAR = 1e-4  # of the best prices; nearer is not worth the time


def solver() -> Any:
    """scipy's linprog; Refused where scipy is not installed."""
    try:
        from scipy.optimize import linprog  # type: ignore[import-untyped]
    except ImportError as error:
        raise Refused("scipy is not installed, so no lower bound can be worked out", "pip install scipy") from error
    return linprog


class Priced(NamedTuple):
    """Of each kind, in GPU-seconds."""

    prices: Floats  # for a second of progress
    fees: Floats | None = None  # for a second of a member; None: there is no cap

    def least_gpu_s(self, work: Work, cap: float | None) -> Floats:
        """What each task adds to the GPU-seconds that any of them take at least. Where the fees are more than
        the work is worth it is nothing, as if the task were not there: all take no less than some."""
        priced: Floats = self.prices[work.kind] * work.gpu_s
        if cap is None or self.fees is None:
            return priced
        return np.maximum(0.0, priced - self.fees[work.kind] * work.most_gpu_s(cap))


def prices(sets: Sets, gpu_s: Floats, pool: set[int], most_gpu_s: Floats | None = None) -> tuple[Priced, list[int]]:
    """Best for that much work of each kind, in so many member-seconds; and the sets that do it. `pool` grows."""
    linprog, kinds = solver(), len(gpu_s)
    pool.update(alone(sets))
    best, best_s, used = Priced(np.zeros(kinds)), -1.0, list[int]()
    for _ in range(ROUNDS):
        places = sorted(pool)
        rows, most = -sets.progress(places, kinds), -gpu_s
        if most_gpu_s is not None:
            rows, most = np.vstack((rows, sets.heads(places, kinds))), np.append(most, most_gpu_s)
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
