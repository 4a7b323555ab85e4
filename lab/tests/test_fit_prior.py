"""What a task counts as of which only the memory is known: it ships as it was found, and holds for others."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import BY_SIZE, TYPICAL_BY_SIZE, UNKNOWN, by_size, progress_rates, typical
from lab.tools import fit_prior

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "lab" / "results" / "simulation" / "prior.json").read_text(encoding="utf-8"))


def test_it_ships_as_it_was_found() -> None:
    assert [size["below_mib"] for size in FOUND["sizes"]] == [below for below, _ in BY_SIZE]
    for size, (_, demand) in zip(FOUND["sizes"], BY_SIZE, strict=True):
        assert {name: getattr(demand, name) for name in fit_prior.FIELDS} == size["demand"]


def test_what_was_found_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = fit_prior.measured()
    for size in FOUND["sizes"]:
        of_size = fit_prior.within(runs, size["below_mib"])
        assert len(of_size) == size["runs"] >= 100
        assert fit_prior.fit([demand for _, demand in of_size]) == by_size(size["below_mib"] - 1)


def test_it_is_cautious_for_nine_in_ten_and_for_tasks_of_another_card() -> None:
    for size in FOUND["sizes"]:
        for held in (size["held_for_these"], size["held_for_published"]):
            assert min(held["burden"], held["promise"]) >= 0.89


def test_the_larger_the_more_demanding_and_never_more_than_the_unknown() -> None:
    sizes = [by_size(mib) for mib in (100, 1_499, 1_500, 2_999, 3_000, 80_000)]
    assert sizes[0] == sizes[1] != sizes[2] == sizes[3] != sizes[4]
    assert sizes[4] is sizes[5] is UNKNOWN
    neighbour = Demand(0.5, 0.2, 0.2, 0.7, 0.5)
    slowed = [progress_rates([neighbour, demand])[0] for demand in sizes]
    assert slowed == sorted(slowed, reverse=True)


def test_typical_demands_ship_as_found_and_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = fit_prior.measured()
    edges = [below for below, _ in TYPICAL_BY_SIZE]
    for size, (below, demand) in zip(FOUND["typical"], TYPICAL_BY_SIZE, strict=True):
        assert (inf if size["below_mib"] is None else size["below_mib"]) == below
        assert {name: getattr(demand, name) for name in fit_prior.FIELDS} == size["demand"]
        of_size = fit_prior.within(runs, below, edges)
        assert len(of_size) == size["runs"] >= 100
        assert fit_prior.fit_typical([one for _, one in of_size]) == demand


def test_a_typical_task_is_less_demanding_than_a_bad_case_of_its_size() -> None:
    neighbour = Demand(0.5, 0.2, 0.2, 0.7, 0.5)
    rates = []
    for mib in (100, 1_499, 1_500, 2_999, 3_000, 5_999, 6_000, 11_999, 12_000, 10**9):
        expected, bad = (progress_rates([neighbour, one(mib)])[0] for one in (typical, by_size))
        assert expected > bad
        rates.append(expected)
    assert rates == sorted(rates, reverse=True)
