"""What a second of work is worth: prices under which no set of tasks earns more than 1 in a second of a GPU.

A GPU then does priced work at a speed of at most 1, whatever it holds. So the priced work of any tasks, over the
number of GPUs, is a time that no policy can beat. The best prices come out of a linear program: the fewest GPU-seconds
in which all work can be done, over all mixes of sets (its dual). It is solved with few sets at first; those that earn
too much are added. The prices are scaled by what the best of ALL sets earns, so that what is said holds whether or not
the solver got to the end, and however exact it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from carma.errors import Refused
from carma.sim.bound_sets import Floats, Sets

ROUNDS = 60
MORE = 200  # sets that are added in a round
NEAR = 1e-4  # of the best prices; nearer is not worth the time


def solver() -> Any:
    """scipy's linprog; Refused where scipy is not installed."""
    try:
        from scipy.optimize import linprog  # type: ignore[import-untyped]
    except ImportError as error:
        raise Refused(
            "scipy is not installed, so no lower bound can be worked out", "pip install 'carma[report]'"
        ) from error
    return linprog


def prices(sets: Sets, gpu_s: Floats, pool: set[int]) -> tuple[Floats, list[int]]:
    """Of each kind's progress, best for that much work of each; and the sets that do it. `pool` grows."""
    linprog, kinds = solver(), len(gpu_s)
    pool.update(alone(sets))
    best, best_s, used = np.zeros(kinds), -1.0, list[int]()
    for _ in range(ROUNDS):
        places = sorted(pool)
        found = linprog(np.ones(len(places)), A_ub=-sets.progress(places, kinds), b_ub=-gpu_s, method="highs")
        if found.x is None:
            break
        asked = np.maximum(0.0, -found.ineqlin.marginals)
        worth = sets.worth(asked)
        top = float(worth.max())
        if top <= 0.0:
            break
        used = [places[at] for at in np.flatnonzero(found.x > 1e-9)]
        if float(asked @ gpu_s) / top > best_s:
            best, best_s = asked / top, float(asked @ gpu_s) / top
        if found.fun <= best_s * (1.0 + NEAR):
            break
        pool.update(int(place) for place in np.argsort(-worth, kind="stable")[:MORE])
    return best, used


def alone(sets: Sets) -> list[int]:
    """The sets of one task."""
    kinds = sets.members.max() if sets.members.shape[1] > 1 else np.inf
    return [int(place) for place in np.flatnonzero((sets.members[:, 1:] == kinds).all(axis=1))]
