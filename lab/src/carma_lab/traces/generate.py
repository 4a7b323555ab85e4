"""Generates a random trace: Poisson arrivals or bursts, tasks drawn by class. A seed gives one trace."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from carma.core.model.values import Record
from carma.traces.schema import Trace
from carma.traces.table import Table
from carma_lab.traces.task_classes import CLASSES, Shares, Urn, split

# Seven of eight gaps are short, a tenth of the mean; the eighth is long enough to keep the mean. The median gap is
# therefore 8 % of the mean; in the Philly trace it is 7 % (8 s of 114 s).
BURST_SHARE = 7 / 8
BURST_GAP = 0.1


class Recipe(Record, frozen=True, kw_only=True):
    tasks: int
    rate_per_hour: float
    seed: int = 0
    shares: Shares = Shares()
    burst: bool = False
    users: int = 0

    def spelled(self) -> str:
        """The command that generates the trace."""
        words = f"carma trace generate --tasks {self.tasks} --rate {self.rate_per_hour:g} --seed {self.seed}"
        words += f" --shares {self.shares}" + (" --burst" if self.burst else "")
        return words + (f" --users {self.users}" if self.users else "")


def generate(recipe: Recipe, table: Table) -> Trace:
    dice = random.Random(recipe.seed)
    urn = Urn(table, dice)
    counts = zip(CLASSES, split(recipe.shares, recipe.tasks), strict=True)
    kinds = [kind for kind, count in counts for _ in range(count)]
    dice.shuffle(kinds)
    tasks = tuple(
        msgspec.structs.replace(urn.draw(kind), arrival_s=at, user=_user(recipe.users, dice))
        for kind, at in zip(kinds, _arrivals(recipe, dice), strict=False)
    )
    how = "in bursts" if recipe.burst else "by a Poisson process"
    source = f"Made by: {recipe.spelled()}. Arrivals {how}. Tasks are drawn from {table.name}: {table.source}"
    return Trace(name="generated.csv", tasks=tasks, source=source)


def _user(users: int, dice: random.Random) -> str:
    return f"user{dice.randrange(users) + 1}" if users else ""


def _arrivals(recipe: Recipe, dice: random.Random) -> Iterator[float]:
    """Arrival times from 0, rounded to milliseconds, so that the file is short and equal on all machines."""
    mean_s = 3600 / recipe.rate_per_hour
    long_s = mean_s * (1 - BURST_SHARE * BURST_GAP) / (1 - BURST_SHARE)
    at = 0.0
    while True:
        yield round(at, 3)
        if not recipe.burst:
            at += dice.expovariate(1 / mean_s)
        elif dice.random() < BURST_SHARE:
            at += dice.expovariate(1 / (BURST_GAP * mean_s))
        else:
            at += dice.expovariate(1 / long_s)
