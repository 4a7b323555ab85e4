"""The table of the simulated experiments is made from the file of results, and says what is in it."""

from __future__ import annotations

import json
from typing import Any

from lab.tools import paper_tables


def _part(makespan: float) -> dict[str, Any]:
    one = {"makespan": makespan, "completion": 0.4, "slowdown": 1.2, "energy": 0.9, "ooms": 2}
    return {"gpus": 4, "tasks": 60, "bound": 0.5, "policies": {name: one for name, _ in paper_tables.POLICIES}}


def test_the_table_is_as_in_the_file() -> None:
    for page, text in paper_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "make it again: python -m lab.tools.paper_tables"


def test_means_are_geometric_and_of_four_gpus_only() -> None:
    eight = {**_part(0.9), "gpus": 8}
    made = paper_tables.short({"limits": {"rows": [_part(0.4), _part(0.9), eight]}})
    assert "| `goodput` without a cap | 0.60 |  | 0.40 | 1.20 | 0.90 | 4 | - |" in made
    assert "| `lucid` | 0.60 | 0.86 |" in made
    assert "simulated: 120 tasks of 2 published traces on 4 A100s, and 0 windows" in made.replace("\n", " ")


def test_philly_has_a_column_of_its_own() -> None:
    parts = {"limits": {"rows": [_part(0.4)]}, "philly": {"sizes": [{"gpus": 4, "rows": [_part(0.6), _part(0.6)]}]}}
    made = paper_tables.short(parts)
    assert "| `goodput` without a cap | 0.40 |  | 0.40 | 1.20 | 0.90 | 2 | 0.60 |" in made
    assert "| the limit: no policy can beat it | 0.50 |  |  |  |  |  | 0.50 |" in made


def test_goodputs_page_says_how_far_its_cap_was_kept() -> None:
    parts = json.loads(paper_tables.RESULTS.read_text(encoding="utf-8"))["parts"]
    rows = [row["capped"] for size in parts["philly"]["sizes"] for row in size["rows"]]
    above = [row["slowdown_max"] for row in rows if row["slowdown_max"] > row["cap"] + 0.01]
    page = " ".join((paper_tables.ROOT / "docs" / "goodput.md").read_text(encoding="utf-8").split())
    numbers = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
    if not above:
        assert f"no task came out above {rows[0]['cap']:g} in {len(rows)}" in page
        return
    assert f"a task still came out above {rows[0]['cap']:g} in {numbers[len(above)]} of {len(rows)}" in page
    assert f"at {max(above):.2f} at most" in page
