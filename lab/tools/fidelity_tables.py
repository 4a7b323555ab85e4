"""Writes the simulator's errors and the gains of sharing on a real card into the pages: `python -m
lab.tools.fidelity_tables`.

`--check` writes nothing and says whether they are up to date. Figures come from lab/results/simulation/fidelity and
lab/results/simulation/fidelity-h200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.markdown import placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "simulation"
VIRTUAL, CARD = RESULTS / "fidelity", RESULTS / "fidelity-h200"
PAGE = ROOT / "docs" / "simulation.md"
Words = Mapping[str, tuple[str, str]]
OWN, ALONE, FIRST = "worked out from this run", "this run: all were alone", "the exclusive run"
VIRTUAL_ROWS: Words = {
    "exclusive": ("exclusive", ALONE),
    "magm": ("magm", OWN),
    "magm-solo": ("magm", FIRST),
    "unknown": ("magm, memory not known", OWN),
    "unknown-solo": ("magm, memory not known", FIRST),
}
CARD_ROWS: Words = {
    "exclusive": ("exclusive", ALONE),
    "goodput": ("goodput", OWN),
    "goodput-solo": ("goodput", FIRST),
}
FIGURES = ("makespan_s", "completion_mean_s", "sm_active_mean", "memory_mib_mean", "energy_j")
RUNS = {"exclusive": "`exclusive`", "goodput": "`goodput`"}  # those that were recorded


def judged(found: Mapping[str, Any], words: Words) -> str:
    titles = (
        *("run", "solo times from", "makespan", "mean completion", "SM activity", "memory", "energy"),
        *("a task, median", "nine in ten", "its speed", "OOMs"),
    )
    return table(titles, [_row(found[name], *told) for name, told in words.items()])


def _row(one: Mapping[str, Any], run: str, solo: str) -> tuple[str, ...]:
    gaps = {gap["figure"]: gap for gap in one["figures"]}
    errors = (f"{100 * gaps[name]['error']:+.1f} %" for name in FIGURES)
    tasks = (f"{100 * one[name]:.1f} %" for name in ("task_median", "task_p90"))
    speed = "" if one["speed_error"] is None else f"{one['speed_error']:.3f}"
    return run, solo, *errors, *tasks, speed, f"{gaps['ooms']['simulated']} for {gaps['ooms']['real']}"


def gained(runs: Mapping[str, Any]) -> str:
    """What was recorded on the card under each policy, beside exclusive GPUs."""
    titles = (
        *("policy", "makespan", "against exclusive", "completion, mean", "slowdown, mean", "slowdown, worst"),
        *("SM activity", "energy", "against exclusive", "OOMs"),
    )
    first = runs["exclusive"]
    return table(titles, [_gain(words, runs[name], first) for name, words in RUNS.items()])


def _gain(words: str, run: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[str, ...]:
    one, alone = run["figures"], first["figures"]
    slow = slowdowns(run, first)
    return (
        *(words, f"{one['makespan_s']:.0f} s", _change(one["makespan_s"], alone["makespan_s"])),
        *(f"{one['completion_mean_s']:.0f} s", f"{sum(slow) / len(slow):.2f}", f"{max(slow):.2f}"),
        *(
            f"{one['sm_active_mean']:.2f}",
            f"{one['energy_j'] / 1000:.0f} kJ",
            _change(one["energy_j"], alone["energy_j"]),
        ),
        str(one["ooms"]),
    )


def slowdowns(run: Mapping[str, Any], first: Mapping[str, Any]) -> Sequence[float]:
    """Each task's run, from its start to its end, against the one that it had alone."""
    alone_s = {task["name"]: _ran_s(task) for task in first["tasks"]}
    return [_ran_s(task) / alone_s[task["name"]] for task in run["tasks"]]


def _ran_s(task: Mapping[str, Any]) -> float:
    last = task["attempts"][-1]
    return float(last["ended_at"] - last["started_at"])


def _change(value: float, before: float) -> str:
    return f"{100 * (value / before - 1):+.0f} %" if value != before else ""


def results(folder: Path, words: Words) -> dict[str, Any]:
    return {name: json.loads((folder / f"fidelity-{name}.json").read_text(encoding="utf-8")) for name in words}


def recorded() -> dict[str, Any]:
    return {name: json.loads((CARD / f"run-{name}.json").read_text(encoding="utf-8")) for name in RUNS}


def pages() -> dict[Path, str]:
    gains = gained(recorded())
    return placed((
        (PAGE, "fidelity", judged(results(VIRTUAL, VIRTUAL_ROWS), VIRTUAL_ROWS)),
        (PAGE, "fidelity on a card", judged(results(CARD, CARD_ROWS), CARD_ROWS)),
        (PAGE, "gains on a card", gains),
        (ROOT / "docs" / "results.md", "gains on a card", gains),
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(renew("lab.tools.fidelity_tables", __doc__, sys.argv[1:], pages))
