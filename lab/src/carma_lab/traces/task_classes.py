"""Light, medium and heavy tasks: which is which, how many of each there shall be, and drawing one of a class.

A task's class is what it holds of GPU memory for how long, in GiB-hours over all its GPUs: light below 1, heavy from 14
on. The published shares have no published rule. With this one the heavy tasks are as many as was published: 8 % of
trace mix and 17 % of trace heavy; of mix 62 % are light, where 65 % was published.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from carma.errors import BadTrace
from carma.traces.schema import TraceTask
from carma.traces.table import Table

LIGHT_BELOW_GIB_H = 1.0
HEAVY_FROM_GIB_H = 14.0
Class = Literal["light", "medium", "heavy"]
CLASSES: tuple[Class, ...] = ("light", "medium", "heavy")


class Shares(NamedTuple):
    """Of each class; they need not add up to 100. The default is published of trace mix."""

    light: float = 65.0
    medium: float = 27.0
    heavy: float = 8.0

    def __str__(self) -> str:
        return ",".join(f"{share:g}" for share in self)


def class_of(task: TraceTask) -> Class:
    held = task.gpus * task.memory_mib / 1024 * task.seconds / 3600
    if held < LIGHT_BELOW_GIB_H:
        return "light"
    return "medium" if held < HEAVY_FROM_GIB_H else "heavy"


def split(shares: Shares, tasks: int) -> tuple[int, ...]:
    """So many of each class, `tasks` in all: rounded down, and what is left goes where most was lost."""
    exact = [share / sum(shares) * tasks for share in shares]
    counts = [int(part) for part in exact]
    for place in sorted(range(len(exact)), key=lambda each: counts[each] - exact[each])[: tasks - sum(counts)]:
        counts[place] += 1
    return tuple(counts)


class Urn:
    """Tasks of a table by class. The same seed draws the same ones."""

    def __init__(self, table: Table, dice: random.Random) -> None:
        self._table = table
        self._dice = dice
        self._kept: dict[tuple[Class, str], Sequence[TraceTask]] = {}

    def draw(self, kind: Class, gpus: int | None = None) -> TraceTask:
        """One of the class. With `gpus`, one that asks for as many as that where there are any: one, or several."""
        wanted = "any" if gpus is None else "one" if gpus == 1 else "several"
        if (kind, wanted) not in self._kept:
            self._kept[kind, wanted] = self._matching(kind, wanted)
        return self._dice.choice(self._kept[kind, wanted])

    def _matching(self, kind: Class, wanted: str) -> Sequence[TraceTask]:
        all_of_it = [task for task in self._table.tasks.values() if class_of(task) == kind]
        if not all_of_it:
            raise BadTrace(
                f"{self._table.name}: no {kind} task in it",
                f"Give a table that has one, or {kind} tasks a share of 0: --shares.",
            )
        fitting = [task for task in all_of_it if wanted == "any" or (task.gpus == 1) == (wanted == "one")]
        return fitting or all_of_it
