"""A replay of the measured groups with core/scheduling/rate_correction.py: for lab/tools/sharing_fit.py.

Every prediction begins with the model fitted without the judged task. Then what was measured corrects it:

- `same_group`: groups that are in both tables under MPS. The rates of one table are observed as the product observes
  the first minute together (after 10, 20 and 40 s), and the other table's are predicted. The tables hold one rate of
  each task and group, over one to two seconds, and were measured in two sessions, so that the noise between sessions
  is included, and nothing is drawn.
- `other_groups`: all groups in a random order; each is predicted from those before it, never from the same group.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from carma.core.model.values import Correction
from carma.core.scheduling.rate_correction import SCALE, SCALE_SLOPE, corrected, observed, uncertainty, unobserved
from carma.core.scheduling.sharing_model import CAUTION
from lab.tools.sharing_data import Group
from lab.tools.sharing_forms import Array, Rates

FIRST_MINUTE = 3  # observations
ORDERS = 20


class Predicted(NamedTuple):
    """A measured group with the rates that the model says without each task."""

    tasks: tuple[str, ...]
    predicted: tuple[float, ...]
    was: tuple[float, ...]
    guessed: bool = False

    @property
    def name(self) -> tuple[str, ...]:
        return tuple(sorted(self.tasks))


Known = dict[str, Correction]


class Judged(NamedTuple):
    was: float
    before: tuple[float, float]  # predicted, and the cautious rate
    after: tuple[float, float]


def replayed(
    later: Sequence[Group], earlier: Sequence[Group], unseen: Array, rates: Rates, guessed: bool = False
) -> dict[str, Any]:
    """`unseen`: the rates predicted for both tables, in the order of `rates`. `guessed`: engine activity and power were
    not known for that."""
    left = iter(unseen.tolist())
    groups = [
        Predicted(one.tasks, tuple(next(left) for _ in one.tasks), one.rates, guessed) for one in (*later, *earlier)
    ]
    first = {one.name: one for one in groups[: len(later)]}
    twice = [(first[one.name], one) for one in groups[len(later) :] if one.name in first and _distinct(one)]
    pairs = [*twice, *((other, one) for one, other in twice)]
    return {
        "variances": variances(unseen, rates, twice),
        "same_group": summary(list(chain.from_iterable(same_group(one, other) for one, other in pairs))),
        "other_groups": summary([each for seed in range(ORDERS) for each in other_groups(groups, seed)], ORDERS),
    }


def _distinct(group: Predicted) -> bool:
    return len(set(group.tasks)) == len(group.tasks)


def same_group(first: Predicted, second: Predicted) -> Iterator[Judged]:
    known: Known = {}
    for _ in range(FIRST_MINUTE):
        observe(known, first)
    return judged(known, second)


def other_groups(groups: Sequence[Predicted], seed: int) -> Iterator[Judged]:
    order = list(groups)
    random.Random(seed).shuffle(order)
    known: Known = {}
    done: set[tuple[str, ...]] = set()
    for group in order:
        if group.name not in done:
            yield from judged(known, group)
        done.add(group.name)
        observe(known, group)


def observe(known: Known, group: Predicted) -> None:
    for place, task in enumerate(group.tasks):
        beside = [*group.tasks[:place], *group.tasks[place + 1 :]]
        one = known.get(task, unobserved(task))
        known[task] = observed(one, beside, group.predicted[place], group.was[place])


def judged(known: Known, group: Predicted) -> Iterator[Judged]:
    nothing = [None] * len(group.tasks)
    before = _with_cautious(group, nothing)
    after = _with_cautious(group, [known.get(task, unobserved(task)) for task in group.tasks])
    return (Judged(*each) for each in zip(group.was, before, after, strict=True))


def _with_cautious(group: Predicted, known: Sequence[Correction | None]) -> list[tuple[float, float]]:
    least, slope = CAUTION["mps"][group.guessed]
    rates, parts = corrected(group.predicted, known), uncertainty(known)
    pairs = zip(rates, parts, strict=True)
    return [(rate, rate * float(np.exp(part * (slope * (rate - 1.0) - least)))) for rate, part in pairs]


def summary(found: Sequence[Judged], times: int = 1) -> dict[str, Any]:
    """Each rate was judged `times` times."""
    was = np.array([one.was for one in found])
    before, after = (np.array([getattr(one, when) for one in found]) for when in ("before", "after"))
    return {"rates": len(found) // times, "before": _errors(was, before), "after": _errors(was, after)}


def _errors(was: Array, said: Array) -> dict[str, float]:
    off = np.abs(said[:, 0] - was)
    found = {"mean_abs": off.mean(), "p90": np.quantile(off, 0.9), "kept_to_cautious": (was >= said[:, 1]).mean()}
    return {name: round(float(value), 4) for name, value in found.items()}


def variances(unseen: Array, rates: Rates, twice: Sequence[tuple[Predicted, Predicted]]) -> dict[str, float]:
    """Of deviations, in the unit of rate_correction.py: between tasks, between two measurements of a group, and the
    rest, which is between the groups of a task."""
    deviations = np.log(rates.was / unseen) / _scale(unseen)
    means = [deviations[rates.task == task].mean() for task in np.unique(rates.task)]
    differences = [
        np.log(rate / other.was[other.tasks.index(task)]) / _scale(predicted)
        for one, other in twice
        for task, predicted, rate in zip(one.tasks, one.predicted, one.was, strict=True)
    ]
    own, noise = float(np.var(means)), float(np.var(differences)) / 2.0
    found = {"own": own, "beside": float(np.var(deviations)) - own - noise, "noise": noise}
    return {name: round(value, 3) for name, value in found.items()}


def _scale(rate: Any) -> Any:
    return SCALE + SCALE_SLOPE * (1.0 - rate)
