"""The table of docs/preemption.md is the one that its file of results makes, and says what the page says of it."""

from __future__ import annotations

import json
from typing import Any

from lab.tools.preemption_table import RATE_PER_HOUR, SAVES, TASKS, URGENT_EVERY, page
from lab.tools.simulated_table import POLICIES, SEEDS
from tests.docs.markdown import ROOT

FOUND: dict[str, Any] = json.loads((ROOT / "lab/results/simulation/preemption.json").read_text(encoding="utf-8"))


def mean(policy: str, save: str) -> dict[str, float]:
    found: dict[str, float] = FOUND["cases"][policy][save]["mean"]
    return found


def test_the_page_has_the_table_of_the_results() -> None:
    assert page(FOUND) in (ROOT / "docs/preemption.md").read_text(encoding="utf-8")
    about = FOUND["about"]
    assert (about["seeds"], about["tasks"]) == (SEEDS, TASKS)
    assert (about["rate_per_hour"], about["urgent_every"]) == (RATE_PER_HOUR, URGENT_EVERY)


def test_urgent_tasks_wait_less_and_the_others_hardly_longer() -> None:
    for policy in POLICIES:
        off = mean(policy, "off")
        assert off["preemptions"] == 0
        for save in (name for name in SAVES if name != "off"):
            on = mean(policy, save)
            assert on["urgent_wait_min"] < off["urgent_wait_min"] / 2
            assert on["others_completion_h"] < 1.05 * off["others_completion_h"]


def test_where_gpus_are_shared_most_came_in_while_others_still_saved_and_more_were_asked_than_helped() -> None:
    for save in ("20 s", "120 s"):
        shared, alone = mean("magm", save), mean("exclusive", save)
        assert shared["before_they_left"] > shared["helped"] / 2
        assert alone["before_they_left"] < alone["helped"] / 2
        assert shared["preemptions"] > shared["helped"]
        assert shared["too_busy"] == shared["helped"]
