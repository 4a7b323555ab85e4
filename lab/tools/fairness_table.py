"""Effect of fair shares on users of unequal load, simulated, and the tables of docs/fairness.md.

    python -m lab.tools.fairness_table

Each trace is random, from a seed: users whose tasks are drawn from the same table, each with a rate of their
own. It is run with fairness.enabled off and on. Finish-time fairness and Jain's index are those of `carma run-report`
(carma_lab/reports/fairness.py).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from carma.traces.schema import Trace
from carma.traces.table import shipped_table
from carma_lab.reports.fairness import fairness
from carma_lab.traces.generate import Recipe, generate
from lab.tools.simulated_table import GPUS, POLICIES, SEEDS, about, mean, publish, rounded, simulated
from tools.markdown import table

WRITTEN, PAGE = Path("lab/results/simulation/fairness.json"), Path("docs/fairness.md")
HOURS = 8
CASES: dict[str, dict[str, float]] = {  # tasks an hour, by user
    "two users": {"few": 1.5, "many": 12.0},
    "two users, twice as many tasks": {"few": 3.0, "many": 24.0},
    "six users": {"user1": 0.5, "user2": 1.0, "user3": 1.0, "user4": 2.0, "user5": 3.0, "user6": 8.0},
}


class Seen(NamedTuple):
    """One run."""

    worst_user: float  # the largest of the users' mean finish-time ratios
    worst_task: float
    jain_finish_time: float
    jain_slowdown: float
    makespan_h: float
    completion_mean_h: float


def trace_of(rates: dict[str, float], seed: int) -> Trace:
    """Each user's tasks arrive by a Poisson process of their own, for HOURS hours."""
    tasks = []
    for place, (user, rate) in enumerate(sorted(rates.items())):
        recipe = Recipe(tasks=max(1, round(rate * HOURS)), rate_per_hour=rate, seed=1000 * seed + place)
        tasks += [replace(task, user=user) for task in generate(recipe, shipped_table()).tasks]
    tasks.sort(key=lambda task: (task.arrival_s, task.user))
    return Trace(name="generated", tasks=tuple(tasks), source="lab.tools.fairness_table")


def run(rates: dict[str, float], policy: str, seed: int, *, fair: bool) -> Seen:
    made = simulated(trace_of(rates, seed), policy, seed, "fairness.enabled", fair)
    figures = made.run()
    found = fairness(made.runs, GPUS)
    assert found is not None
    assert found.jain_finish_time is not None
    assert found.jain_slowdown is not None
    assert found.finish_time_max is not None
    return Seen(
        worst_user=max(user.finish_time_mean for user in found.users if user.finish_time_mean is not None),
        worst_task=found.finish_time_max,
        jain_finish_time=found.jain_finish_time,
        jain_slowdown=found.jain_slowdown,
        makespan_h=figures.makespan_s / 3600,
        completion_mean_h=fmean(one.ended_s - one.arrival_s for one in made.runs) / 3600,
    )


def case(rates: dict[str, float], policy: str) -> dict[str, Any]:
    off, on = ([run(rates, policy, seed, fair=fair) for seed in range(SEEDS)] for fair in (False, True))
    pairs = list(zip(off, on, strict=True))
    return {
        "off": mean(off),
        "on": mean(on),
        "seeds_with_worst_user_better": sum(after.worst_user < before.worst_user for before, after in pairs),
        "seeds_with_jain_higher": sum(after.jain_finish_time > before.jain_finish_time for before, after in pairs),
        "by_seed": [{"off": rounded(before), "on": rounded(after)} for before, after in pairs],
    }


def worked_out() -> dict[str, Any]:
    cases = {
        name: {"rates_per_hour": rates, **{policy: case(rates, policy) for policy in POLICIES}}
        for name, rates in CASES.items()
    }
    return {"about": {**about("lab.tools.fairness_table"), "hours": HOURS}, "cases": cases}


def page(found: dict[str, Any]) -> str:
    header = ["trace", "policy", "turns", "worst user", "worst task", "Jain's index", "mean completion", "makespan"]
    rows = [
        [name, policy, words, *_figures(case[policy][turns])]
        for name, case in found["cases"].items()
        for policy in POLICIES
        for turns, words in (("off", "by age"), ("on", "by share"))
    ]
    return table(header, rows)


def _figures(mean: dict[str, float]) -> list[str]:
    return [
        f"{mean['worst_user']:.2f}",
        f"{mean['worst_task']:.2f}",
        f"{mean['jain_finish_time']:.3f}",
        f"{mean['completion_mean_h']:.2f} h",
        f"{mean['makespan_h']:.2f} h",
    ]


if __name__ == "__main__":
    publish(worked_out(), WRITTEN, PAGE, "fairness", page)
