"""The table of docs/fairness.md is the one that its file of results makes, and says what the page says of it."""

from __future__ import annotations

import json
from typing import Any

from lab.tools.fairness_table import CASES, page
from lab.tools.simulated_table import POLICIES, SEEDS
from tests.docs.markdown import ROOT

FOUND: dict[str, Any] = json.loads((ROOT / "lab/results/simulation/fairness.json").read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_the_results() -> None:
    assert page(FOUND) in (ROOT / "docs/fairness.md").read_text(encoding="utf-8")
    assert FOUND["about"]["seeds"] == SEEDS
    assert {name: case["rates_per_hour"] for name, case in FOUND["cases"].items()} == CASES


def test_turns_lower_the_worst_users_ratio_and_raise_jains_index() -> None:
    for case in FOUND["cases"].values():
        for policy in POLICIES:
            off, on = case[policy]["off"], case[policy]["on"]
            assert on["worst_user"] < off["worst_user"]
            assert on["jain_finish_time"] > off["jain_finish_time"]
            assert abs(on["makespan_h"] / off["makespan_h"] - 1) < 0.02
