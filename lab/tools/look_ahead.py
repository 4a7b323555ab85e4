"""What a joint choice of waiting tasks and GPUs would bring, beside the limit of each shipped trace, with the tables of
docs/goodput.md.

    python -m lab.tools.look_ahead
    python -m lab.tools.look_ahead --tables      the tables only, from the file of results

1. For each shipped trace: the makespan with all known, and the lower bounds (carma_lab.simulator.bound).
2. On generated traces on which constants may be tuned: the forms of a joint choice that were tried, compared with the
   shipped pass. The product has none of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple
from unittest import mock

from carma.core import propose
from carma.core.model.events import TaskPlaced
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, Demand
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.policy import as_of
from carma.core.scheduling.reasons import Choice, conclude
from carma.core.scheduling.scheduling_pass import SchedulingPass, schedule
from carma.core.scheduling.sharing_model import progress_rates
from carma.core.scheduling.snapshot import expected_runtime_s
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import State
from carma_lab.runs.figures import Figures
from carma_lab.simulator.bound import bound
from carma_lab.simulator.simulated_cards import CARDS
from lab.tools.policy_evaluation import BASELINE, RATIOS, ROOT, SHIPPED, Case, Variant, geometric, run, trace_of
from lab.tools.simulated_table import CARD, GPUS, made_by
from tools.markdown import placed, renew, table

RESULTS = ROOT / "lab" / "results" / "simulation" / "look-ahead.json"
SEEDS = range(5_000, 5_020)
KNOWN = Variant("`goodput`, all known", "goodput", "measured")
COPIES = 4  # tasks on a GPU for the price of a task


class Form(NamedTuple):
    """Of the first `window` waiting tasks, the one that adds most goes first, if it adds `margin` more than the first
    task. `priced`: progress counts by the part of a GPU that it needs, so that heavy tasks are not left to the end."""

    window: int
    margin: float
    priced: bool


FORMS = (Form(8, 0.0, False), Form(8, 0.0, True), Form(8, 0.1, True), Form(8, 0.2, True), Form(8, 0.3, True))


@lru_cache(4096)
def price(demand: Demand) -> float:
    """The part of a GPU that a task needs, beside copies of itself."""
    return 1.0 / max(count * progress_rates((demand,) * count)[0] for count in range(1, COPIES + 1))


def worth(demands: tuple[Demand, ...], form: Form) -> float:
    rates = progress_rates(demands)
    return sum((price(one) if form.priced else 1.0) * rate for one, rate in zip(demands, rates, strict=True))


def gain(found: SchedulingPass, choice: Choice, form: Form) -> float:
    """What the task adds on the worst of its GPUs. All demands are known."""
    assert choice.ask.demand is not None
    gains = []
    for one in found.candidates:
        if one.view.gpu.id in choice.chosen:
            there = tuple([holder.demand for holder in one.view.holders if holder.demand is not None])
            gains.append(worth((*there, choice.ask.demand), form) - worth(there, form))
    return min(gains)


def next_task(found: SchedulingPass, waiting: list[Task], form: Form) -> Task:
    """The best of the window; the first task if it cannot start, so that it gets its reservation."""
    state, best = found.state, (-inf, waiting[0])
    tried = state.overtaken.get(waiting[0].id, 0) < state.rules.queue.overtakes
    for place, task in enumerate(waiting[: form.window if tried else 1]):
        ask = ask_of(task, state, as_of(found.now))
        choice = found._choose(ask, expected_runtime_s(task, state.rules))
        if choice.chosen:
            added = gain(found, choice, form)
            if added > best[0] + (form.margin if best[1] is waiting[0] and place else 0.0):
                best = (added, task)
        elif place == 0 and found.first_refused is None:
            break
    return best[1]


def jointly(form: Form, state: State, now: float, cache: VerdictCache | None = None) -> list[TaskPlaced]:
    """As `schedule`, with a joint choice."""
    if not state.queue or not state.gpus:
        return schedule(state, now, cache)
    found, done = SchedulingPass(state, now, cache), list[TaskPlaced]()
    waiting = list(found.tasks())
    while waiting and not found._over:
        first, task = waiting[0], next_task(found, waiting, form)
        choice = found.consider(task)
        waiting.remove(task)
        if not choice.chosen:
            continue
        decision = conclude(choice, state.policy.name, now)
        assert decision.placement is not None
        overtook = found.overtakes(choice) or (first.id if first is not task else None)
        key = AttemptKey(task.id, task.key.attempt + 1)
        done.append(TaskPlaced(now, key, decision.placement, decision.reason, overtook, decision.verdicts))
    return done


@contextmanager
def looking_ahead(form: Form) -> Iterator[None]:
    with mock.patch.object(propose, "schedule", partial(jointly, form)):
        yield


def limits(name: str) -> dict[str, float]:
    """Relative to the makespan of exclusive GPUs."""
    case, trace = Case(name, 0.0), trace_of(name)
    base_s, reached = run(case, BASELINE).makespan_s, run(case, KNOWN)
    least = bound(trace, CARDS[CARD], GPUS, slowdown_cap=1.5)
    seconds = {"reached": reached.makespan_s, "limit": least.makespan_s, "arrivals": least.arrivals_s}
    seconds |= {"work": least.work_s, "last_arrival": trace.tasks[-1].arrival_s - trace.tasks[0].arrival_s}
    return {key: round(value / base_s, 4) for key, value in seconds.items()}


def compared(form: Form, shipped: list[Figures]) -> dict[str, Any]:
    """Relative to the shipped pass, on the same traces."""
    with looking_ahead(form):
        runs = [run(Case(str(seed), 1.0), KNOWN) for seed in SEEDS]
    pairs = list(zip(runs, shipped, strict=True))
    ratios = {name: geometric([getattr(one, name) / getattr(other, name) for one, other in pairs]) for name in RATIOS}
    slowdown = geometric([one.slowdown_mean or 1.0 for one in runs]).mean
    return {**form._asdict(), **{name: ratio._asdict() for name, ratio in ratios.items()}, "slowdown_mean": slowdown}


def evaluated() -> dict[str, Any]:
    shipped = [run(Case(str(seed), 1.0), KNOWN) for seed in SEEDS]
    return {
        "about": {**made_by("lab.tools.look_ahead"), "seeds": f"{SEEDS[0]} to {SEEDS[-1]}"},
        "limits": {name: limits(name) for name in SHIPPED},
        "shipped_slowdown_mean": geometric([one.slowdown_mean or 1.0 for one in shipped]).mean,
        "forms": [compared(form, shipped) for form in FORMS],
    }


def limits_table(found: dict[str, Any]) -> str:
    keys = ("reached", "limit", "arrivals", "work", "last_arrival")
    rows = [[f"`{name}`", *(f"{row[key]:.2f}" for key in keys)] for name, row in found["limits"].items()]
    means = [f"{geometric([row[key] for row in found['limits'].values()]).mean:.3f}" for key in keys]
    return table(["trace", "reached", "limit", "by arrivals", "by work", "last arrival"], [*rows, ["all", *means]])


def forms_table(found: dict[str, Any]) -> str:
    header = ["tasks", "progress", "margin", "makespan", "completion, mean", "p95", "slowdown"]
    return table(header, [_row(form) for form in found["forms"]])


def _row(form: dict[str, Any]) -> list[str]:
    named = [str(form["window"]), "by price" if form["priced"] else "as it is", f"{form['margin']:g}"]
    ratios = (form[name] for name in RATIOS[:3])
    return [
        *named,
        *(f"{one['mean']:.3f} ({one['low']:.3f}-{one['high']:.3f})" for one in ratios),
        f"{form['slowdown_mean']:.2f}",
    ]


def pages() -> Any:
    found, page = json.loads(RESULTS.read_text(encoding="utf-8")), ROOT / "docs" / "goodput.md"
    texts = (("limits of the shipped traces", limits_table(found)), ("joint choices", forms_table(found)))
    return placed((page, mark, f"\n{text}\n") for mark, text in texts)


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--tables"]
    if "--tables" not in sys.argv:
        RESULTS.write_text(json.dumps(evaluated(), indent=1) + "\n", encoding="utf-8")
    sys.exit(renew("lab.tools.look_ahead", __doc__, arguments, pages))
