"""Light, medium and heavy tasks: the class of a task, numbers of tasks from shares, and drawing tasks of a class.

The class follows from memory times duration, in GiB-hours over all GPUs of the task: light below 1, heavy from 14. The
publication gives shares but no rule. With this rule the shares of heavy tasks are those published: 8 % of trace mix and
17 % of trace heavy. 62 % of mix are light (published: 65 %).
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
    """Shares of the classes; the sum need not be 100. The default is published for trace mix."""

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
    """Numbers of tasks of each class, `tasks` in total (largest remainder method)."""
    exact = [share / sum(shares) * tasks for share in shares]
    counts = [int(part) for part in exact]
    for place in sorted(range(len(exact)), key=lambda each: counts[each] - exact[each])[: tasks - sum(counts)]:
        counts[place] += 1
    return tuple(counts)


class Urn:
    """Draws tasks of a table by class. A seed gives one sequence."""

    def __init__(self, table: Table, dice: random.Random) -> None:
        self._table = table
        self._dice = dice
        self._cache: dict[tuple[Class, str], Sequence[TraceTask]] = {}

    def draw(self, kind: Class, gpus: int | None = None) -> TraceTask:
        """A task of the class. With `gpus`: one with one GPU, or with several, if the table has any."""
        wanted = "any" if gpus is None else "one" if gpus == 1 else "several"
        if (kind, wanted) not in self._cache:
            self._cache[kind, wanted] = self._matching(kind, wanted)
        return self._dice.choice(self._cache[kind, wanted])

    def _matching(self, kind: Class, wanted: str) -> Sequence[TraceTask]:
        all_of_it = [task for task in self._table.tasks.values() if class_of(task) == kind]
        if not all_of_it:
            raise BadTrace(
                f"{self._table.name} has no {kind} task",
                f"Give a table with {kind} tasks, or set their share to 0 with --shares.",
            )
        fitting = [task for task in all_of_it if wanted == "any" or (task.gpus == 1) == (wanted == "one")]
        return fitting or all_of_it
