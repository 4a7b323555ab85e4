"""Effect of preemption on urgent tasks, and its cost for the others, simulated, and the table of docs/preemption.md.

    python -m lab.tools.preemption_table

Each trace is random, from a seed: background tasks that can be asked to save, and now and then an urgent one of
higher priority. It is run without preemption, and with it at two prices of a save.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from carma.core.model import events as e
from carma.core.model.values import TaskId
from carma.core.scheduling.explanation import waiting
from carma.core.state import State
from carma.traces.schema import Trace
from carma.traces.table import shipped_table
from carma_lab.runs.figures import quantile
from carma_lab.traces.generate import Recipe, generate
from lab.tools.simulated_table import POLICIES, SEEDS, about, mean, publish, rounded, simulated
from tools.markdown import table

WRITTEN, PAGE = Path("lab/results/simulation/preemption.json"), Path("docs/preemption.md")
TASKS, RATE_PER_HOUR, URGENT_EVERY = 80, 12.0, 8  # one task in this number is urgent
SAVES: dict[str, float | None] = {"off": None, "20 s": 20.0, "120 s": 120.0}  # duration of a save; None: no preemption


class Seen(NamedTuple):
    """One run."""

    urgent_wait_min: float
    urgent_wait_p95_min: float
    others_completion_h: float
    makespan_h: float
    preemptions: float
    helped: float  # urgent tasks for which another task was asked to save
    too_busy: float  # of these, those that waited because the GPUs were too busy
    before_they_left: float  # of those helped: started while a task that was asked for them was still saving


class Asked:
    """Follows a run's events: for whom others were asked, and whether they were still there when it started."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.saving: dict[TaskId, TaskId] = {}  # who was asked and has not left -> for whom
        self.helped: set[TaskId] = set()
        self.early: set[TaskId] = set()
        self.too_busy: set[TaskId] = set()

    def follow(self, event: e.AnyEvent) -> None:
        match event:
            case e.PreemptionRequested(task=task, room_for=urgent) if urgent is not None:
                self.saving[task] = urgent
                if urgent not in self.helped and waiting(self.state, event.at, [urgent])[urgent].code == "Utilisation":
                    self.too_busy.add(urgent)
                self.helped.add(urgent)
            case e.AttemptEnded(key=key) | e.TaskPlaced(key=key):
                if isinstance(event, e.TaskPlaced) and key.task in self.saving.values():
                    self.early.add(key.task)
                self.saving.pop(key.task, None)
            case _:
                pass


def trace_of(save_s: float | None, seed: int) -> Trace:
    made = generate(Recipe(tasks=TASKS, rate_per_hour=RATE_PER_HOUR, seed=seed), shipped_table())
    tasks = [
        replace(task, priority=0, user="urgent")
        if place % URGENT_EVERY == URGENT_EVERY - 1
        else replace(task, priority=-5, user="background", save_s=save_s)
        for place, task in enumerate(made.tasks)
    ]
    return Trace(name="generated", tasks=tuple(tasks), source="lab.tools.preemption_table")


def run(save_s: float | None, policy: str, seed: int) -> Seen:
    made = simulated(trace_of(save_s, seed), policy, seed, "preemption.enabled", save_s is not None)
    asked = Asked(made.state)
    for event in made.events():
        asked.follow(event)
    figures = made.figures(0.0)
    assert figures.failed == 0
    waits = [one.wait_s / 60 for one in made.runs if one.user == "urgent"]
    others_s = [one.ended_s - one.arrival_s for one in made.runs if one.user != "urgent"]
    return Seen(
        urgent_wait_min=fmean(waits),
        urgent_wait_p95_min=quantile(waits, 0.95),
        others_completion_h=fmean(others_s) / 3600,
        makespan_h=figures.makespan_s / 3600,
        preemptions=figures.preemptions,
        helped=len(asked.helped),
        too_busy=len(asked.too_busy),
        before_they_left=len(asked.early),
    )


def case(save_s: float | None, policy: str) -> dict[str, Any]:
    runs = [run(save_s, policy, seed) for seed in range(SEEDS)]
    return {"mean": mean(runs), "by_seed": [rounded(one) for one in runs]}


def worked_out() -> dict[str, Any]:
    workload = {"tasks": TASKS, "rate_per_hour": RATE_PER_HOUR, "urgent_every": URGENT_EVERY}
    cases = {policy: {name: case(save_s, policy) for name, save_s in SAVES.items()} for policy in POLICIES}
    return {"about": {**about("lab.tools.preemption_table"), **workload}, "cases": cases}


def page(found: dict[str, Any]) -> str:
    header = ("policy", "preemption", "urgent wait", "its 95th percentile", "others' completion", "makespan")
    words = {name: "off" if name == "off" else f"a save takes {name}" for name in SAVES}
    rows = [
        [policy, words[name], *_figures(found["cases"][policy][name]["mean"])] for policy in POLICIES for name in SAVES
    ]
    return table((*header, "asked", "for", "started before they left"), rows)


def _figures(mean: dict[str, float]) -> list[str]:
    return [
        f"{mean['urgent_wait_min']:.1f} min",
        f"{mean['urgent_wait_p95_min']:.1f} min",
        f"{mean['others_completion_h']:.2f} h",
        f"{mean['makespan_h']:.2f} h",
        f"{mean['preemptions']:.1f}",
        f"{mean['helped']:.1f}",
        f"{mean['before_they_left']:.1f}",
    ]


if __name__ == "__main__":
    publish(worked_out(), WRITTEN, PAGE, "preemption", page)
