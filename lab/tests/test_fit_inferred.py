"""Inferred activity: the constants ship as they were found, and the bounds hold for tasks that were not fitted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from carma.core.model.values import Record
from carma.core.telemetry import inferred_activity
from carma.core.telemetry.window import METRICS
from lab.tools import fit_inferred

FOUND = json.loads(fit_inferred.RESULTS.read_text(encoding="utf-8"))
SHIPPED = {metric: getattr(inferred_activity, metric.upper()) for metric in METRICS}
SETS = {one["name"]: one for one in FOUND["sets"]}


def test_it_ships_as_it_was_found() -> None:
    assert {metric: fields(curve) for metric, curve in SHIPPED.items()} == FOUND["curves"]


def fields(one: Record) -> dict[str, float]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


@pytest.fixture(scope="module")
def sets() -> fit_inferred.Sets:
    return fit_inferred.readings()


@pytest.mark.parametrize("metric", METRICS)
def test_what_was_found_is_found_again(metric: str, sets: fit_inferred.Sets) -> None:
    runs = [run for family in fit_inferred.FAMILIES for run in sets[family]]
    curve = fit_inferred.fit(metric, runs)
    assert (curve.factor, curve.exponent) == pytest.approx((SHIPPED[metric].factor, SHIPPED[metric].exponent), abs=2e-3)
    for name in ("demands", "profiles", "shared", "copies", "a100"):
        assert fit_inferred.judged(metric, SHIPPED[metric], sets[name]) == SETS[name][metric]


def test_the_bounds_hold_for_nine_in_ten_readings_of_shared_cards_and_of_tasks_alone() -> None:
    for name in ("shared", "copies", "demands", "profiles"):
        assert min(SETS[name][metric]["below_bound"] for metric in METRICS) >= 0.9
    assert min(SETS["a100"][metric]["below_bound"] for metric in METRICS) >= 0.85


def test_the_gate_never_stays_open_on_a_shared_card_that_a_measured_figure_would_close() -> None:
    assert SETS["shared"]["gate"]["open_but_busy"] == SETS["copies"]["gate"]["open_but_busy"] == 0.0


def test_rates_from_inferred_demands_are_as_good_as_from_measured_ones() -> None:
    assert fit_inferred.rates() == FOUND["rates"]
    measured, inferred = FOUND["rates"]["measured"], FOUND["rates"]["inferred"]
    assert inferred["mean_error"] < measured["mean_error"] + 0.01
    assert inferred["cautious_holds"] >= 0.9


def test_the_page_has_the_tables_of_the_file() -> None:
    command = [sys.executable, "-m", "lab.tools.fit_inferred", "--tables", "--check"]
    assert subprocess.run(command, cwd=fit_inferred.ROOT, check=False).returncode == 0
