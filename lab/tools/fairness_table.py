"""What taking turns does for users of unequal load, simulated, and the tables of docs/fairness.md made of it.

    python -m lab.tools.fairness_table

Each trace is made by chance from a seed: users whose tasks are drawn from the same table, each with a rate of their
own. It is run with fairness.enabled off and on. Finish-time fairness and Jain's index are those of `carma run-report`
(carma_lab/reports/fairness.py).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from carma import __version__
from carma.traces.schema import Trace
from carma.traces.table import shipped_table
from carma_lab.reports.fairness import Fairness, fairness
from carma_lab.simulator.request import Request, simulation
from carma_lab.traces.generate import Recipe, generate
from tools.markdown import filled, table

WRITTEN, PAGE = Path("lab/results/simulation/fairness.json"), Path("docs/fairness.md")
GPUS, CARD, HOURS, SEEDS = 4, "a100-40", 8, 10
POLICIES = ("exclusive", "magm")
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
    """Each user's tasks arrive by a Poisson process of their own, for so many hours."""
    tasks = []
    for place, (user, rate) in enumerate(sorted(rates.items())):
        recipe = Recipe(tasks=max(1, round(rate * HOURS)), rate_per_hour=rate, seed=1000 * seed + place)
        tasks += [replace(task, user=user) for task in generate(recipe, shipped_table()).tasks]
    tasks.sort(key=lambda task: (task.arrival_s, task.user))
    return Trace(name="generated", tasks=tuple(tasks), source="lab.tools.fairness_table")


def run(rates: dict[str, float], policy: str, seed: int, *, fair: bool) -> Seen:
    settings: dict[str, object] = {"fairness.enabled": "yes" if fair else "no"}
    request = Request(
        trace="generated", policy=policy, gpus=GPUS, gpu=CARD, demand="history", seed=seed, settings=settings
    )
    made = simulation(request, trace_of(rates, seed))
    figures = made.run()
    found = fairness(made.runs, GPUS)
    assert found is not None
    return seen_of(found, figures.makespan_s, fmean(one.ended_s - one.arrival_s for one in made.runs))


def seen_of(found: Fairness, makespan_s: float, completion_s: float) -> Seen:
    ratios = [user.finish_time_mean for user in found.users if user.finish_time_mean is not None]
    assert found.jain_finish_time is not None
    assert found.jain_slowdown is not None
    assert found.finish_time_max is not None
    return Seen(
        worst_user=max(ratios),
        worst_task=found.finish_time_max,
        jain_finish_time=found.jain_finish_time,
        jain_slowdown=found.jain_slowdown,
        makespan_h=makespan_s / 3600,
        completion_mean_h=completion_s / 3600,
    )


def case(rates: dict[str, float], policy: str) -> dict[str, Any]:
    off = [run(rates, policy, seed, fair=False) for seed in range(SEEDS)]
    on = [run(rates, policy, seed, fair=True) for seed in range(SEEDS)]
    pairs = list(zip(off, on, strict=True))
    return {
        "off": _mean(off),
        "on": _mean(on),
        "seeds_with_worst_user_better": sum(after.worst_user < before.worst_user for before, after in pairs),
        "seeds_with_jain_higher": sum(after.jain_finish_time > before.jain_finish_time for before, after in pairs),
        "by_seed": [{"off": _rounded(before), "on": _rounded(after)} for before, after in pairs],
    }


def _mean(runs: Sequence[Seen]) -> dict[str, float]:
    return _rounded(Seen(*(fmean(values) for values in zip(*runs, strict=True))))


def _rounded(seen: Seen) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seen._asdict().items()}


def worked_out() -> dict[str, Any]:
    about = {
        "command": "python -m lab.tools.fairness_table",
        "date": datetime.now(UTC).date().isoformat(),
        "carma": __version__,
        "python": platform.python_version(),
        "gpus": f"{GPUS} x {CARD}, simulated",
        "seeds": SEEDS,
        "hours": HOURS,
    }
    cases = {
        name: {"rates_per_hour": rates, **{policy: case(rates, policy) for policy in POLICIES}}
        for name, rates in CASES.items()
    }
    return {"about": about, "cases": cases}


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


def main() -> None:
    found = worked_out()
    WRITTEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    made = page(found)
    print(made)
    if PAGE.exists():
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled(text, "fairness", f"\n{made}\n"), encoding="utf-8")
    print(f"Written to {WRITTEN}; the table of {PAGE} is this now.")


if __name__ == "__main__":
    main()
