"""Fits core/scheduling/sharing_model.py on tables of `carma bench interference`, and says how wrong it is about tasks
it has not seen.

    python -m lab.tools.fit_sharing --out lab/results/h200/sharing.json

A task's rate is predicted by a model that was fitted without any group that holds the task. Beside it stand a constant
and a log-linear fit on the others' summed SM activity, on the same folds. Standard library only, about two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing

FOLDER = Path("lab/results/h200")
MPS, MPS_FIRST, SLICES = "interference-mps.json", "interference-mps-first.json", "interference-timeslice.json"
IDLE_W, LIMIT_W = 75.0, 700.0  # of the H200: with nobody on it, and its power limit


class Group(NamedTuple):
    tasks: tuple[str, ...]
    demands: tuple[Demand, ...]
    rates: tuple[float, ...]  # against running alone


Parameters = tuple[float, ...]
Model = Callable[[Parameters, Group], Sequence[float]]


def load(name: str, engine: dict[str, float] | None = None) -> list[Group]:
    """`engine`: engine activity by task, for a table that was measured before it was read."""
    table = json.loads((FOLDER / name).read_text())
    alone: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        if len(row["tasks"]) == 1 and row["percent"] == [100]:
            alone.setdefault(row["tasks"][0], []).append(row)
    demands = {
        task: _demand(rows, table["measure_s"], None if engine is None else engine[task])
        for task, rows in alone.items()
    }
    groups = []
    for row in table["rows"]:
        if len(row["tasks"]) > 1 and set(row["percent"]) == {100}:
            solo = row.get("solo_rates") or [mean(one["rates"][0] for one in alone[task]) for task in row["tasks"]]
            rates = tuple(min(1.0, rate / base) for rate, base in zip(row["rates"], solo, strict=True))
            groups.append(Group(tuple(row["tasks"]), tuple(demands[task] for task in row["tasks"]), rates))
    return groups


def _demand(rows: Sequence[dict[str, Any]], measure_s: float, engine: float | None) -> Demand:
    watts = mean(row["energy_j"] for row in rows) / measure_s
    return Demand(
        sm_active=mean(row["sm_active"] for row in rows),
        sm_occupancy=mean(row["sm_occupancy"] for row in rows),
        dram_active=mean(row["dram_active"] for row in rows),
        gr_active=mean(row["gr_active"] for row in rows) if engine is None else engine,
        power=min(1.0, max(0.0, (watts - IDLE_W) / (LIMIT_W - IDLE_W))),
    )


# The models. Those of core/scheduling/sharing_model.py are used as they are, with its constants set to what is tried.


def at_once(parameters: Parameters, group: Group) -> Sequence[float]:
    sharing.PRESS, sharing.CROWD, sharing.WIDTH = (abs(value) for value in parameters)
    return sharing.progress_rates(group.demands, "mps")


def in_slices(parameters: Parameters, group: Group) -> Sequence[float]:
    sharing.SLICES = min(1.0, abs(parameters[0]))
    return sharing.progress_rates(group.demands, "timeslice")


def constant(parameters: Parameters, group: Group) -> Sequence[float]:
    return [parameters[0]] * len(group.tasks)


def log_linear(parameters: Parameters, group: Group) -> Sequence[float]:
    """The usual one: log of the rate, linear in own and in the others' summed SM activity."""
    total = sum(demand.sm_active for demand in group.demands)
    return [
        min(1.0, exp(parameters[0] + parameters[1] * demand.sm_active + parameters[2] * (total - demand.sm_active)))
        for demand in group.demands
    ]


def without(group: Group) -> Group:
    """The same as a server sees it that knows neither engine activity nor power of its tasks."""
    plain = tuple(Demand(one.sm_active, one.sm_occupancy, one.dram_active) for one in group.demands)
    return group._replace(demands=plain)


# Fitting.


def loss(model: Model, parameters: Parameters, groups: Sequence[Group]) -> float:
    """Soft absolute error: a few groups that went wrong do not pull."""
    total = 0.0
    for group in groups:
        for said, was in zip(model(parameters, group), group.rates, strict=True):
            total += (1.0 + ((said - was) / 0.1) ** 2) ** 0.5 - 1.0
    return total


def fit(model: Model, start: Parameters, groups: Sequence[Group]) -> Parameters:
    """Nelder and Mead's simplex, which needs no derivatives."""

    def cost(point: Parameters) -> float:
        return loss(model, point, groups)

    size = len(start)
    points = [tuple(start)]
    for place in range(size):
        points.append(tuple(value * 1.25 + 0.02 if at == place else value for at, value in enumerate(start)))
    simplex = sorted((cost(point), point) for point in points)
    for _ in range(120 * size):
        if simplex[-1][0] - simplex[0][0] < 1e-4:
            break
        centre = tuple(mean(point[place] for _, point in simplex[:-1]) for place in range(size))
        worst = simplex[-1]
        tried = _step(cost, centre, worst[1], 1.0)
        if tried[0] < simplex[0][0]:
            tried = min(tried, _step(cost, centre, worst[1], 2.0))
        elif tried[0] >= simplex[-2][0]:
            tried = _step(cost, centre, worst[1], -0.5)
        if tried[0] < worst[0]:
            simplex[-1] = tried
        else:
            best = simplex[0][1]
            halved = [tuple((a + b) / 2 for a, b in zip(best, point, strict=True)) for _, point in simplex[1:]]
            simplex[1:] = [(cost(point), point) for point in halved]
        simplex.sort()
    return simplex[0][1]


def _step(
    cost: Callable[[Parameters], float], centre: Parameters, worst: Parameters, by: float
) -> tuple[float, Parameters]:
    point = tuple(middle + by * (middle - bad) for middle, bad in zip(centre, worst, strict=True))
    return cost(point), point


def unseen(
    model: Model, start: Parameters, groups: Sequence[Group], judged: Sequence[Group] | None = None
) -> dict[str, Any]:
    """Errors of every task's rate in `judged` (the same groups otherwise), fitted on the groups without that task."""
    errors: list[float] = []
    by_task: dict[str, float] = {}
    begin = fit(model, start, groups)
    for task in sorted({task for group in groups for task in group.tasks}):
        parameters = fit(model, begin, [group for group in groups if task not in group.tasks])
        own = [
            model(parameters, group)[place] - group.rates[place]
            for group in judged or groups
            for place, name in enumerate(group.tasks)
            if name == task
        ]
        errors += own
        by_task[task] = round(mean(map(abs, own)), 4)
    return {**_errors(errors), "by_task": by_task}


def _errors(errors: Sequence[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    return {
        "rates": len(sizes),
        "mae": round(mean(sizes), 4),
        "p90": round(quantiles(sizes, n=10, method="inclusive")[-1], 4),
        "bias": round(mean(errors), 4),
    }


def proxies(groups: Sequence[Group]) -> dict[str, float]:
    """How engine activity and power follow from what every server knows; least squares without a constant term."""
    known = {task: demand for group in groups for task, demand in zip(group.tasks, group.demands, strict=True)}
    rows = list(known.values())
    aa = sum(one.sm_active**2 for one in rows)
    ab = sum(one.sm_active * one.dram_active for one in rows)
    bb = sum(one.dram_active**2 for one in rows)
    ya = sum(one.sm_active * (one.power or 0.0) for one in rows)
    yb = sum(one.dram_active * (one.power or 0.0) for one in rows)
    even = aa * bb - ab * ab
    above = median((one.gr_active or 0.0) - one.sm_active for one in rows if (one.gr_active or 0.0) < 0.98)
    return {
        "engine_above_sm": round(above, 3),
        "power_of_sm": round((ya * bb - yb * ab) / even, 3),
        "power_of_dram": round((yb * aa - ya * ab) / even, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the sharing model on the tables in lab/results/h200.")
    parser.add_argument("--out", type=Path, default=FOLDER / "sharing.json")
    out: Path = parser.parse_args().out
    shipped = (sharing.PRESS, sharing.CROWD, sharing.WIDTH)
    groups = load(MPS)
    engine = {
        task: demand.gr_active or 0.0
        for group in groups
        for task, demand in zip(group.tasks, group.demands, strict=True)
    }
    earlier, slices = load(MPS_FIRST, engine), load(SLICES, engine)
    middle = mean(rate for group in groups for rate in group.rates)
    start = (0.6, 2.7, 2.3)
    usual = (log(0.95), 0.01, -0.3)
    found: dict[str, Any] = {
        "command": f"python -m lab.tools.fit_sharing --out {out}",
        "tables": [MPS, MPS_FIRST, SLICES],
        "error": "of a task's rate, fitted without every group that holds the task",
        "mps": {
            "groups": len(groups),
            "shipped": dict(zip(("press", "crowd", "width"), shipped, strict=True)),
            "fitted_on_both": [round(value, 3) for value in fit(at_once, start, [*groups, *earlier])],
            "this": unseen(at_once, start, groups),
            "this_fitted_here_judged_on_the_earlier_table": unseen(at_once, start, groups, earlier),
            "this_on_both_tables": unseen(at_once, start, [*groups, *earlier]),
            "log_linear_on_sm_activity": unseen(log_linear, usual, groups),
            "constant": unseen(constant, (middle,), groups),
        },
        "timeslice": {
            "groups": len(slices),
            "shipped": sharing.SLICES,
            "fitted": [round(value, 3) for value in fit(in_slices, (0.9,), slices)],
            "this": unseen(in_slices, (0.9,), slices),
            "constant": unseen(constant, (middle,), slices),
        },
        "guesses": proxies(groups),
    }
    blind = [without(group) for group in groups]
    found["mps"]["this_without_engine_activity_and_power"] = unseen(at_once, start, groups, blind)
    out.write_text(json.dumps(found, indent=1) + "\n")
    for mechanism in ("mps", "timeslice"):
        for name, errors in found[mechanism].items():
            if isinstance(errors, dict) and "mae" in errors:
                print(f"{mechanism:10s} {name:46s} MAE {errors['mae']:.3f}  p90 {errors['p90']:.3f}")
    print(found["mps"]["fitted_on_both"], found["timeslice"]["fitted"], found["guesses"])


if __name__ == "__main__":
    main()
