"""Which tasks are put together: groups drawn so that every task meets many others, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

Group = tuple[str, ...]


def draw(names: Sequence[str], sizes: dict[int, int], seed: int) -> list[Group]:
    """`sizes` says how many groups of each size; within a size no group repeats, and tasks take part about equally."""
    chance = random.Random(seed)
    groups: list[Group] = []
    for size, wanted in sorted(sizes.items()):
        taken: dict[str, int] = dict.fromkeys(names, 0)
        seen: set[Group] = set()
        tries = 0
        while len(seen) < wanted and tries < 100 * wanted:
            tries += 1
            order = sorted(names, key=lambda name: taken[name] + chance.random() * 3)
            group = tuple(sorted(order[:size]))
            if group in seen:
                continue
            seen.add(group)
            groups.append(group)
            for name in group:
                taken[name] += 1
    return groups
