"""Every measured figure in the documentation comes from a file of results: tables are made by a tool, and the sentences
that state a figure are checked here."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

import pytest

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates
from lab.tools import figure_tables
from lab.tools.figure_tables import below, cell, figure, results
from tests.docs.markdown import ROOT

H200_PAGE = (ROOT / "lab" / "results" / "h200" / "README.md").read_text(encoding="utf-8")
RESULTS_PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_tables_of_figures_are_made_from_the_files_of_results() -> None:
    for page, text in figure_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m lab.tools.figure_tables"


def test_a_figure_is_found_by_its_path() -> None:
    points = [{"task": "small", "copies": 1, "speed": 1.0}, {"task": "small", "copies": 8, "speed": 7.5}]
    assert below(below(points, "8"), "speed") == 7.5
    assert below(below(below(points, "small"), "speed"), "max") == 7.5
    assert below(points, "count") == 2
    with pytest.raises(KeyError):
        below(points, "nosuch")


def test_a_cell_has_the_unit_of_its_form_and_a_dash_for_a_missing_figure() -> None:
    assert cell(27_000.0, "{:.1f} h") == "7.5 h"
    assert cell([1.15, 1.17], "{:g} x") == "1.15-1.17 x"
    assert cell([5.35, 5.35], "{:g} x") == "5.35 x"
    assert cell(None, "{:.1f} s") == "-"


def _said(pattern: str) -> list[float]:
    """The numbers that a sentence of the page says, wherever its lines are folded."""
    found = re.search(pattern, " ".join(H200_PAGE.split()))
    assert found is not None, f"the page does not say {pattern!r}"
    return [float(text) for text in found.groups()]


def test_activity_is_said_to_grow_as_the_images_do() -> None:
    told = _said(r"Eight copies .* make ([\d.]+) times the images of one, and show ([\d.]+) times its SM activity")
    points = {copies: f"h200/collocation.json/points/small/mps/{copies}" for copies in (1, 8)}
    for factor, what in zip(told, ("images_per_s", "sm_active"), strict=True):
        assert factor == round(figure(f"{points[8]}/{what}") / figure(f"{points[1]}/{what}"), 1)


def test_the_drift_of_tasks_alone_is_as_in_the_table() -> None:
    alone: dict[str, list[dict[str, Any]]] = {}
    for row in results("h200/interference-mps.json")["rows"]:
        if len(row["tasks"]) == 1 and row["percent"] == [100]:
            alone.setdefault(row["tasks"][0], []).append(row)
    assert {len(rows) for rows in alone.values()} == {3}
    drifts: dict[bool, list[float]] = {True: [], False: []}
    for rows in alone.values():
        rates = [row["rates"][0] for row in rows]
        full = min(row["gr_active"] for row in rows) > 0.99
        drifts[full].append(100 * (max(rates) / min(rates) - 1))
    told = _said(r"up to (\d+) % faster than the slowest \(median of those tasks (\d+) %\).* stayed within (\d+) %")
    assert told[:2] == [round(max(drifts[False])), round(median(drifts[False]))]
    assert max(drifts[True]) < told[2]


def test_what_thread_percentages_cost_is_as_in_the_file() -> None:
    told = _said(r"gives up (\d+) % of its speed at 25 % of the threads, and (\d+) % at 50 %")
    for percent, share in zip((25, 50), told, strict=True):
        before, after = (
            figure(f"h200/interference-mps.json/percentages/{percent}/heavy_{when}") for when in ("before", "after")
        )
        assert share == round(100 * (1 - after / before))


def test_what_is_said_of_the_provoked_ooms_is_so() -> None:
    rounds = {one["rung"]: one for one in results("h200/oom.json")["rounds"]}
    for rung, one in rounds.items():
        guilty = {"filler"} if rung == "nothing" else {"grower"}
        assert {failed["name"] for failed in one["failed"]} == guilty
        assert {each["outcome"] for each in (one["grower"], *one["innocents"])} == {"succeeded"}
    assert rounds["nothing"]["failed"][0]["blame"] == "neighbour"


def _granted(tasks: int) -> float:
    """Total progress by the sharing model as a part of the measured one; the median over groups of one size."""
    rows = [row for row in results("h200/interference-mps.json")["rows"] if set(row["percent"]) == {100}]
    alone = {row["tasks"][0]: row for row in reversed(rows) if len(row["tasks"]) == 1}
    parts = []
    for row in rows:
        if len(row["tasks"]) == tasks:
            single = [alone[name] for name in row["tasks"]]
            measured = sum(rate / one["rates"][0] for rate, one in zip(row["rates"], single, strict=True))
            demands = [Demand(one["sm_active"], one["sm_occupancy"], one["dram_active"]) for one in single]
            parts.append(sum(progress_rates(demands)) / measured)
    return float(median(parts))


def test_how_pessimistic_the_sharing_model_is_said_to_be() -> None:
    said = re.search(r"grants pairs (\d+) %, triples (\d+) % and quadruples (\d+) %", " ".join(RESULTS_PAGE.split()))
    assert said is not None
    assert [int(text) for text in said.groups()] == [round(100 * _granted(tasks)) for tasks in (2, 3, 4)]
