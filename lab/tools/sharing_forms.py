"""Forms that a model of sharing could have, fitted and judged on the same tables: for lab/tools/sharing_fit.py.

A form says each task's rate from what the task shows alone and what those beside it show, summed. Constants are tried
as they come: `abs` keeps them above zero. The kept forms are those of core/scheduling/sharing_model.py, written again
over arrays, because a fit computes thousands of tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize  # type: ignore[import-untyped]

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing
from lab.tools.sharing_data import Group

Array = npt.NDArray[np.float64]
SM, OCCUPANCY, DRAM, ENGINE, POWER = range(5)


class Rates(NamedTuple):
    """One row for each task of each group."""

    own: Array  # what the task shows alone: columns as above
    others: Array  # the same of those beside it, summed
    engines: Array  # engine activity of all in the group; absent ones are infinite
    size: Array
    was: Array
    task: npt.NDArray[np.str_]
    group: npt.NDArray[np.int64]
    holds: list[frozenset[str]]  # all tasks of the group

    def only(self, rows: npt.NDArray[np.bool_]) -> Rates:
        holds = [names for names, keep in zip(self.holds, rows, strict=True) if keep]
        return Rates(*(column[rows] for column in self[:-1]), holds)  # type: ignore[arg-type, call-arg]


def table(groups: Sequence[Group]) -> Rates:
    most = max(len(group.tasks) for group in groups)
    own, others, engines, rest = [], [], [], []
    for place, group in enumerate(groups):
        shown = np.array([row_of(demand) for demand in group.demands])
        absent = [np.inf] * (most - len(shown))
        for at, rate in enumerate(group.rates):
            own.append(shown[at])
            others.append(shown.sum(axis=0) - shown[at])
            engines.append([*shown[:, ENGINE], *absent])
            rest.append((len(shown), rate, group.tasks[at], place, frozenset(group.tasks)))
    size, was, task, number, holds = zip(*rest, strict=True)
    return Rates(
        np.array(own), np.array(others), np.array(engines), np.array(size, float), np.array(was), np.array(task),
        np.array(number), list(holds),
    )  # fmt: skip


def row_of(demand: Demand) -> list[float]:
    """The demand as a row, with the guesses of core/scheduling/sharing_model.py for unknown figures."""
    engine, power = demand.gr_active, demand.power
    if engine is None:
        engine = min(1.0, demand.sm_active + sharing.ENGINE_ABOVE_SM)
    if power is None:
        power = min(1.0, sharing.POWER_OF_SM * demand.sm_active + sharing.POWER_OF_DRAM * demand.dram_active)
    return [demand.sm_active, demand.sm_occupancy, demand.dram_active, max(engine, demand.sm_active), power]


Constants = Sequence[float] | Array
Says = Callable[[Constants, Rates], Array]


class Form(NamedTuple):
    says: Says
    start: tuple[float, ...]
    what: str


def _hidden(stretch: Array, rates: Rates) -> Array:
    """The GPU's part of a step is stretched, and hides in the slack; never below taking turns."""
    engine = rates.own[:, ENGINE]
    rate = (1.0 - engine**sharing.SLACK + (engine * stretch) ** sharing.SLACK) ** (-1.0 / sharing.SLACK)
    return np.clip(rate, 1.0 / rates.size, 1.0)


def pressed(constants: Constants, rates: Rates, by: int = POWER) -> Array:
    """The form that is kept under MPS: `_at_once` of core/scheduling/sharing_model.py."""
    press, crowd, width, *more = np.abs(constants)
    other = rates.others[:, by]
    stretch = 1.0 + press * other + crowd * np.exp(-width * rates.own[:, SM]) * other**2
    if more:
        stretch = stretch + more[0] * rates.others[:, OCCUPANCY]
    return _hidden(stretch, rates)


def hinged(constants: Constants, rates: Rates) -> Array:
    """The crowd begins where all together draw more than a part of what the card can."""
    press, crowd, width, free = np.abs(constants)
    other = rates.others[:, POWER]
    over = np.maximum(0.0, other + rates.own[:, POWER] - free)
    return _hidden(1.0 + press * other + crowd * np.exp(-width * rates.own[:, SM]) * over, rates)


def additive(columns: Sequence[int]) -> Says:
    def says(constants: Constants, rates: Rates) -> Array:
        return _hidden(1.0 + rates.others[:, list(columns)] @ np.abs(constants), rates)

    return says


def bottleneck(columns: Sequence[int]) -> Says:
    """The scarcest of the resources: all ask for more of it than there is, and are held back in proportion."""

    def says(constants: Constants, rates: Rates) -> Array:
        asked = (rates.own + rates.others)[:, list(columns)] * np.abs(constants)
        return _hidden(np.maximum(1.0, asked.max(axis=1)), rates)

    return says


def log_linear(constants: Constants, rates: Rates) -> Array:
    base, own, others = constants
    return np.minimum(1.0, np.exp(base + own * rates.own[:, SM] + others * rates.others[:, SM]))


def level(constants: Constants, rates: Rates) -> Array:
    """One figure for each number of tasks."""
    figures: Array = np.asarray(constants, float)[np.clip(rates.size.astype(int), 2, 4) - 2]
    return np.clip(figures, 0.0, 1.0)


def fair(constants: Constants, rates: Rates) -> Array:
    """The form that was chosen for time slices, `_in_slices` of core/scheduling/sharing_model.py: those that want least
    are served first."""
    left = np.full(len(rates.size), min(1.0, abs(float(constants[0]))))
    waiting, share = rates.size.copy(), np.zeros(len(rates.size))
    for wanted in np.sort(rates.engines, axis=1).T:
        there = np.isfinite(wanted)
        share = np.where(there, left / np.maximum(waiting, 1.0), share)
        left = left - np.where(there, np.minimum(np.where(there, wanted, 0.0), share), 0.0)
        waiting = waiting - there
    return np.minimum(1.0, share / np.maximum(rates.own[:, ENGINE], 1e-9))


def in_proportion(constants: Constants, rates: Rates) -> Array:
    """All are held back alike once together they ask for more time than there is."""
    asked = rates.own[:, ENGINE] + rates.others[:, ENGINE]
    return np.minimum(1.0, min(1.0, abs(float(constants[0]))) / np.maximum(asked, 1e-9))


_LEVELS = (0.8, 0.7, 0.6)
MPS = {
    "press and crowd": Form(pressed, (0.6, 2.7, 2.3), "power of the others; less so for wide kernels (kept)"),
    "press and crowd, with occupancy": Form(pressed, (0.6, 2.7, 2.3, 0.1), "and the others' occupancy"),
    "press and crowd by SM activity": Form(lambda c, r: pressed(c, r, SM), (0.6, 2.0, 2.3), "no power needed"),
    "press and crowd, all alike": Form(lambda c, r: pressed((*c, 0.0), r), (0.2, 1.5), "own width plays no part"),
    "press and crowd, with a hinge": Form(
        hinged, (0.6, 2.7, 2.3, 0.5), "a crowd from some power on, instead of by its square"
    ),
    "additive": Form(additive((SM, DRAM)), (1.0, 0.5), "a slow-down for each part of SMs and DRAM that others take"),
    "additive, with occupancy": Form(additive((SM, DRAM, OCCUPANCY)), (1.0, 0.5, 0.3), "and of occupancy"),
    "bottleneck": Form(bottleneck((SM, DRAM, POWER)), (1.0, 1.0, 1.0), "the scarcest of SMs, DRAM and power"),
    "bottleneck, with occupancy": Form(bottleneck((SM, DRAM, POWER, OCCUPANCY)), (1.0,) * 4, "or occupancy"),
    "log-linear": Form(log_linear, (-0.05, 0.01, -0.3), "own and the others' SM activity"),
    "one figure for each number": Form(level, _LEVELS, "no demand plays a part"),
}
SLICES = {
    "fair parts": Form(fair, (0.9,), "who wants least is served first (kept)"),
    "in proportion": Form(in_proportion, (0.9,), "all are held back alike"),
    "press and crowd": Form(pressed, (0.6, 2.7, 2.3), "the form of MPS, fitted here"),
    "one figure for each number": Form(level, _LEVELS, "no demand plays a part"),
}


def fit(form: Form, rates: Rates) -> Array:
    """Soft absolute error: a few groups that went wrong do not pull."""

    def loss(constants: Array) -> float:
        return float(np.sum(np.sqrt(1.0 + ((form.says(constants, rates) - rates.was) / 0.1) ** 2) - 1.0))

    begin = np.asarray(form.start, float)
    found: Any = minimize(
        loss, begin, method="Nelder-Mead", options={"maxiter": 400 * len(begin), "xatol": 1e-4, "fatol": 1e-4}
    )
    return np.asarray(found.x, float)


def left_out(form: Form, rates: Rates, kin: Callable[[str], str] = str, judged: Rates | None = None) -> Array:
    """Rates predicted by the form after a fit without all groups that contain the task or a related one."""
    judged = rates if judged is None else judged
    predicted = np.zeros(len(judged.was))
    for one in sorted({kin(str(task)) for task in rates.task}):
        without = np.array([all(kin(name) != one for name in names) for names in rates.holds])
        constants = fit(form, rates.only(without))  # from the start: what was found with all would tell of this one
        rows = np.array([kin(str(task)) == one for task in judged.task])
        predicted[rows] = form.says(constants, judged.only(rows))
    return predicted
