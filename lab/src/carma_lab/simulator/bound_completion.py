"""A mean completion that no policy can beat.

A task ends at least half its run after its mean busy time (when it is worked on, in the mean), because it never goes
faster than alone. Two things keep the mean busy times up. One: it lies at least half the run after the release. Two:
the GPUs together do priced work (bound_prices.py) no faster than one machine of their speed; there a weighted sum of
mean busy times is least when of all who have come the one with the most weight for its size is always taken
(preemptive; Goemans 1997). Each task has a weight between 0 and 1 in the second, and the rest of 1 in the first. Any
weights give a valid bound. They are improved step by step: up for those who would wait, down for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from carma_lab.simulator.bound_sets import Floats, Work

STEPS = 40
MOST_TURNS = 500_000  # tasks times steps: fewer steps for a long trace


def completion_mean_s(work: Work, priced: Iterable[Floats], gpus: int, alone_s: Floats) -> float:
    """`alone_s`: the completions if nobody waited or shared, of all tasks, also of kinds that were not counted."""
    most_s = max((_waits_s(work, prices, gpus) for prices in priced), default=0.0)
    return (float(alone_s.sum()) + most_s) / len(alone_s)


def _waits_s(work: Work, prices: Floats, gpus: int) -> float:
    """By how much the sum of all ends is at least above what it would be if nobody waited or shared."""
    sizes = prices[work.kind] * work.gpu_s / gpus
    least_s = work.release_s + work.seconds / 2
    weights, most_s = np.where(sizes > 0.0, 1.0, 0.0), 0.0
    steps = max(2, min(STEPS, MOST_TURNS // len(sizes)))
    for step in range(steps):
        taken = np.flatnonzero(weights > 0.0)
        late_s = -work.seconds / 2  # where it is not taken it might be done at once
        late_s[taken] = mean_busy_s(work.release_s[taken], sizes[taken], weights[taken]) - least_s[taken]
        most_s = max(most_s, float(weights @ late_s))
        weights = np.where(sizes > 0.0, np.clip(weights + late_s / work.seconds / (1 + step), 0.0, 1.0), 0.0)
    return most_s


def mean_busy_s(release_s: Floats, sizes: Floats, weights: Floats) -> Floats:
    """When each is worked on, in the mean, if the one with the most weight for its size goes first. In the order of
    release."""
    busy_s = np.zeros(len(sizes))
    starts, lengths, ranks = release_s.tolist(), sizes.tolist(), (sizes / weights).tolist()
    left = list(lengths)
    line: list[tuple[float, int]] = []
    now, place = 0.0, 0
    while line or place < len(starts):
        now = now if line else max(now, starts[place])
        place = _arrive(line, starts, ranks, place, now)
        _, first = line[0]
        until = min(now + left[first], starts[place] if place < len(starts) else np.inf)
        busy_s[first] += (now + until) / 2 * (until - now) / lengths[first]
        left[first] -= until - now
        if left[first] <= 1e-12 * lengths[first] or until <= now:
            heappop(line)
        now = until
    return busy_s


def _arrive(
    line: list[tuple[float, int]], starts: Sequence[float], ranks: Sequence[float], place: int, now: float
) -> int:
    while place < len(starts) and starts[place] <= now:
        heappush(line, (ranks[place], place))
        place += 1
    return place
