"""Puts how true the simulator is into docs/simulation.md: `python -m tools.fidelity_tables`.

`--check` writes nothing and says whether the page is up to date. Figures come from results/simulation/fidelity.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.markdown import table
from tools.pages import filled, renew

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "simulation" / "fidelity"
PAGE = ROOT / "docs" / "simulation.md"
ROWS = {
    "fidelity-exclusive": ("exclusive", "this run: all were alone"),
    "fidelity-magm": ("magm", "worked out from this run"),
    "fidelity-magm-solo": ("magm", "the exclusive run"),
    "fidelity-unknown": ("magm, memory not known", "worked out from this run"),
    "fidelity-unknown-solo": ("magm, memory not known", "the exclusive run"),
}
FIGURES = ("makespan_s", "completion_mean_s", "sm_active_mean", "memory_mib_mean", "energy_j")


def judged(found: dict[str, Any]) -> str:
    titles = (
        *("run", "solo times from", "makespan", "mean completion", "SM activity", "memory", "energy"),
        *("a task, median", "nine in ten", "OOMs"),
    )
    return table(titles, [_row(found[name], *words) for name, words in ROWS.items()])


def _row(one: dict[str, Any], run: str, solo: str) -> tuple[str, ...]:
    gaps = {gap["figure"]: gap for gap in one["figures"]}
    errors = (f"{100 * gaps[name]['error']:+.1f} %" for name in FIGURES)
    tasks = (f"{100 * one[name]:.1f} %" for name in ("task_median", "task_p90"))
    return run, solo, *errors, *tasks, f"{gaps['ooms']['simulated']} for {gaps['ooms']['real']}"


def results() -> dict[str, Any]:
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ROWS}


def pages() -> dict[Path, str]:
    return {PAGE: filled(PAGE.read_text(encoding="utf-8"), "fidelity", judged(results()))}


if __name__ == "__main__":
    sys.exit(renew("tools.fidelity_tables", __doc__, sys.argv[1:], pages))
