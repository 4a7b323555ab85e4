"""What asking tasks to save does for urgent ones, and costs the others, simulated; and the table of docs/preemption.md.

    python -m lab.tools.preemption_table

Each trace is made by chance from a seed: background tasks that can be asked to save, and now and then an urgent one of
higher priority. It is run without preemption, and with it at two prices of a save.
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
from carma.core.model import events as e
from carma.core.model.values import TaskId
from carma.core.scheduling.explanation import waiting
from carma.core.state import State
from carma.traces.schema import Trace
from carma.traces.table import shipped_table
from carma_lab.runs.figures import TaskRun, quantile
from carma_lab.simulator.request import Request, simulation
from carma_lab.traces.generate import Recipe, generate
from tools.markdown import filled, table

WRITTEN, PAGE = Path("lab/results/simulation/preemption.json"), Path("docs/preemption.md")
GPUS, CARD, SEEDS = 4, "a100-40", 10
TASKS, RATE_PER_HOUR, URGENT_EVERY = 80, 12.0, 8  # one task in so many is urgent
POLICIES = ("exclusive", "magm")
SAVES: dict[str, float | None] = {"off": None, "20 s": 20.0, "120 s": 120.0}  # what a save takes; None: nobody is asked


class Seen(NamedTuple):
    """One run."""

    urgent_wait_min: float
    urgent_wait_p95_min: float
    others_completion_h: float
    makespan_h: float
    preemptions: float
    helped: float  # urgent tasks for which somebody was asked
    too_busy: float  # of these, those that waited because the GPUs were too busy
    before_they_left: float  # of those helped: started while somebody who was asked for them was still saving


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
    settings: dict[str, object] = {"preemption.enabled": "no" if save_s is None else "yes"}
    request = Request(
        trace="generated", policy=policy, gpus=GPUS, gpu=CARD, demand="history", seed=seed, settings=settings
    )
    made = simulation(request, trace_of(save_s, seed))
    asked = Asked(made.state)
    for event in made.events():
        asked.follow(event)
    figures = made.figures(0.0)
    assert figures.failed == 0
    waits = [one.wait_s / 60 for one in made.runs if one.user == "urgent"]
    return Seen(
        urgent_wait_min=fmean(waits),
        urgent_wait_p95_min=quantile(waits, 0.95),
        others_completion_h=_completion_h([one for one in made.runs if one.user != "urgent"]),
        makespan_h=figures.makespan_s / 3600,
        preemptions=figures.preemptions,
        helped=len(asked.helped),
        too_busy=len(asked.too_busy),
        before_they_left=len(asked.early),
    )


def _completion_h(runs: Sequence[TaskRun]) -> float:
    return fmean(one.ended_s - one.arrival_s for one in runs) / 3600


def _rounded(seen: Seen) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seen._asdict().items()}


def case(save_s: float | None, policy: str) -> dict[str, Any]:
    runs = [run(save_s, policy, seed) for seed in range(SEEDS)]
    mean = Seen(*(fmean(values) for values in zip(*runs, strict=True)))
    return {"mean": _rounded(mean), "by_seed": [_rounded(one) for one in runs]}


def worked_out() -> dict[str, Any]:
    about = {
        "command": "python -m lab.tools.preemption_table",
        "date": datetime.now(UTC).date().isoformat(),
        "carma": __version__,
        "python": platform.python_version(),
        "gpus": f"{GPUS} x {CARD}, simulated",
        "seeds": SEEDS,
        "tasks": TASKS,
        "rate_per_hour": RATE_PER_HOUR,
        "urgent_every": URGENT_EVERY,
    }
    cases = {policy: {name: case(save_s, policy) for name, save_s in SAVES.items()} for policy in POLICIES}
    return {"about": about, "cases": cases}


def page(found: dict[str, Any]) -> str:
    header = [
        "policy",
        "preemption",
        "urgent wait",
        "its 95th percentile",
        "others' completion",
        "makespan",
        "asked",
        "for",
        "started before they left",
    ]
    words = {name: "off" if name == "off" else f"a save takes {name}" for name in SAVES}
    rows = [
        [policy, words[name], *_figures(found["cases"][policy][name]["mean"])] for policy in POLICIES for name in SAVES
    ]
    return table(header, rows)


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


def main() -> None:
    found = worked_out()
    WRITTEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    made = page(found)
    print(made)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(text, "preemption", f"\n{made}\n"), encoding="utf-8")
    print(f"Written to {WRITTEN}; the table of {PAGE} is this now.")


if __name__ == "__main__":
    main()
