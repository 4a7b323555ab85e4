"""A lower bound of the mean completion.

A task ends at least half its duration after its mean busy time (the mean time at which it is worked on), because it is
never faster than alone. Two facts bound the mean busy times from below:

1. A mean busy time is at least half the duration after the release.
2. The GPUs together do priced work (bound_prices.py) no faster than one machine of their total speed. On one machine a
   weighted sum of mean busy times is smallest if the released task with the largest weight per size always runs
   (preemptive; Goemans 1997).

Each task has a weight between 0 and 1 in the second fact, and the rest of 1 in the first. Any weights give a valid
bound. They are improved in steps: increased for tasks that would wait, decreased for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np

from carma_lab.simulator.bound_sets import Floats, Work

STEPS = 40
MOST_TURNS = 500_000  # maximum of tasks times steps: a long trace gets fewer steps


def completion_mean_s(work: Work, priced: Iterable[Floats], gpus: int, alone_s: Floats) -> float:
    """`alone_s`: completions of all tasks without waiting and sharing, also of kinds that `work` leaves out."""
    most_s = max((_waits_s(work, prices, gpus) for prices in priced), default=0.0)
    return (float(alone_s.sum()) + most_s) / len(alone_s)


def _waits_s(work: Work, prices: Floats, gpus: int) -> float:
    """Lower bound of the total delay: the sum of all ends less that sum without waiting and sharing."""
    sizes = prices[work.kind] * work.gpu_s / gpus
    least_s = work.release_s + work.seconds / 2
    weights, most_s = np.where(sizes > 0.0, 1.0, 0.0), 0.0
    steps = max(2, min(STEPS, MOST_TURNS // len(sizes)))
    for step in range(steps):
        taken = np.flatnonzero(weights > 0.0)
        late_s = -work.seconds / 2  # a task with weight 0 might be done at once
        late_s[taken] = mean_busy_s(work.release_s[taken], sizes[taken], weights[taken]) - least_s[taken]
        most_s = max(most_s, float(weights @ late_s))
        weights = np.where(sizes > 0.0, np.clip(weights + late_s / work.seconds / (1 + step), 0.0, 1.0), 0.0)
    return most_s


def mean_busy_s(release_s: Floats, sizes: Floats, weights: Floats) -> Floats:
    """Mean busy time of each task if the task with the largest weight per size runs first. In the order of release."""
    busy_s = np.zeros(len(sizes))
    starts, lengths, ranks = release_s.tolist(), sizes.tolist(), (sizes / weights).tolist()
    left = list(lengths)
    queue: list[tuple[float, int]] = []
    now, place = 0.0, 0
    while queue or place < len(starts):
        now = now if queue else max(now, starts[place])
        while place < len(starts) and starts[place] <= now:
            heappush(queue, (ranks[place], place))
            place += 1
        _, first = queue[0]
        until = min(now + left[first], starts[place] if place < len(starts) else np.inf)
        busy_s[first] += (now + until) / 2 * (until - now) / lengths[first]
        left[first] -= until - now
        if left[first] <= 1e-12 * lengths[first] or until <= now:
            heappop(queue)
        now = until
    return busy_s
