"""The comparison of policies: its traces, its statistics, and the page that it writes."""

from __future__ import annotations

import json
from math import exp, log

import pytest

from carma.core.scheduling.policy import Waits
from carma_lab.simulator.request import Request, simulation
from lab.tools import policy_evaluation as evaluation

FOUND = json.loads(evaluation.RESULTS.read_text(encoding="utf-8"))


def test_the_pages_are_as_in_the_file() -> None:
    for page, text in evaluation.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run python -m lab.tools.policy_evaluation --tables"


def test_the_file_has_every_case_and_its_summary_follows_from_them() -> None:
    assert [(case["trace"], case["noise"]) for case in FOUND["cases"]] == [tuple(case) for case in evaluation.CASES]
    generated = [case["variants"] for case in FOUND["cases"] if case["trace"].isdigit()]
    assert len(generated) == evaluation.GENERATED >= 50
    assert json.loads(json.dumps(evaluation.summary(generated))) == FOUND["generated"]


def test_the_interval_of_a_geometric_mean_contains_it_and_narrows_with_more_values() -> None:
    few, many = evaluation.geometric([0.5, 2.0]), evaluation.geometric([0.5, 2.0] * 8)
    assert few.mean == many.mean == pytest.approx(1.0)
    assert few.low < many.low < 1.0 < many.high < few.high
    assert many.high == pytest.approx(exp(2.1314 * log(2.0) * (16 / 15) ** 0.5 / 4), rel=1e-3)


def test_shortest_first_orders_the_tasks_of_known_run_time() -> None:
    waits = [Waits(1, 30.0), Waits(1, None), Waits(1, 10.0)]
    assert evaluation.shortest_first(waits, 0.0, 4) == [2, 0]


def test_a_run_is_that_of_the_simulator() -> None:
    case = evaluation.Case("t1", 0.0)
    figures = evaluation.run(case, evaluation.BASELINE)
    expected = simulation(Request(trace="t1", policy="exclusive", demand="none")).run()
    assert figures.makespan_s == expected.makespan_s
    shortest = evaluation.run(case, evaluation.VARIANTS[0])
    assert shortest.completion_mean_s < figures.completion_mean_s
