"""The demands of the shipped traces against what was published: the fit of power, the check, its file and its page."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from carma.traces import SHIPPED
from carma_lab.simulator import simulated_cards
from carma_lab.simulator.simulated_cards import CARDS
from lab.tools import demand_check, fit_power, profile_tables, published
from lab_fixtures.small_simulations import row, simulation

ROOT = Path(__file__).parents[2]
WRITTEN = ROOT / "lab" / "results" / "simulation" / "demands.json"
PAGE = ROOT / "docs" / "traces.md"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_power_curve_is_what_the_published_figures_give() -> None:
    found = fit_power.fit(fit_power.published_points(), simulated_cards.A100_40)
    for name in ("of_sm", "of_dram", "sharpness"):
        assert getattr(simulated_cards.A100_40, name) == pytest.approx(getattr(found, name), abs=0.001)
    assert (found.idle_w, found.most_w) == (52.0, 275.0)


def test_a_curve_rises_from_idle_to_the_limit() -> None:
    for card in CARDS.values():
        watts = [card.curve.watts(sm / 10, 0.05 * sm) for sm in range(11)]
        assert watts == sorted(watts)
        assert watts[0] == card.idle_w
        assert card.curve.watts(1.0, 1.0) <= card.most_w
        assert card.curve.share_of(card.curve.watts(0.4, 0.2)) == pytest.approx(card.curve.share(0.4, 0.2))


def test_the_h200_draws_as_measured() -> None:
    """Closer than the curve that it had before, which was off by 61 W on average."""
    off = fit_power.errors(fit_power.measured_points(), simulated_cards.H200)
    assert len(off) > 30
    assert fmean(map(abs, off)) < 30.0


def test_what_is_shown_while_active_leaves_idle_gpus_and_start_up_out() -> None:
    made = simulation(row(seconds=600.0, start_s=100.0), row(gpus=2, busy_gpus=1, seconds=300.0, start_s=50.0), gpus=3)
    figures = made.run()
    shown = demand_check._shown_while_active(made, figures)
    card = made.setup.card
    expected_w = card.curve.watts(0.4, 0.2)
    assert shown == {"sm_active": 0.4, "sm_occupancy": 0.2, "dram_active": 0.2, "power_w": round(expected_w, 1)}


def test_the_file_has_what_an_exclusive_run_shows() -> None:
    told = json.loads(WRITTEN.read_text(encoding="utf-8"))
    assert told["about"]["command"] == "python -m lab.tools.profile_tables --check lab/results/simulation/demands.json"
    for name in SHIPPED:
        assert demand_check._exclusive(name) == pytest.approx(told["exclusive"][name], rel=0.01)


def test_the_file_has_the_distance_of_scaled_from_published() -> None:
    told = json.loads(WRITTEN.read_text(encoding="utf-8"))
    pairs, _ = profile_tables.load(profile_tables.PROFILES)
    tasks = [demand_check._distance(pair, published.read()) for pair in pairs]
    assert tasks == told["tasks"]
    for figure in published.FIGURES:
        assert demand_check._spread(tasks, figure) == told["scaled_less_published"][figure]


def test_the_page_has_the_tables_of_the_file() -> None:
    found = json.loads(WRITTEN.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert demand_check.with_tables(page, found) == page


def test_the_most_that_a_mix_can_draw() -> None:
    """Of a task at half activity and one at full: from idle or from the first to the second, whichever lies higher."""
    point = fit_power.Point
    assert demand_check.most_power_w(0.75, [point("a", 0.5, 0.0, 200.0), point("b", 1.0, 0.0, 260.0)]) == 230.0
    low = demand_check.most_power_w(0.75, [point("a", 0.5, 0.0, 100.0), point("b", 1.0, 0.0, 260.0)])
    assert low == pytest.approx(52.0 + 0.75 * (260.0 - 52.0))


def test_the_page_has_what_the_solo_profiles_explain() -> None:
    told = json.loads(WRITTEN.read_text(encoding="utf-8"))["most_power_of_solo_profiles_w"]
    assert f"draws more than {told['saturn']:.0f} W" in " ".join(PAGE.read_text(encoding="utf-8").split())
    assert told["philly"] < told["saturn"] < 213.0 < 221.0 < told["venus"]


def test_the_check_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "demands.json"
    assert profile_tables.main(["--check", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert "\n".join(demand_check.page(found)) in capsys.readouterr().out
    assert set(found["magm_over_exclusive"]) == {"published", *SHIPPED}
    assert {task["task"] for task in found["tasks"]} == {
        pair.task.name for pair in profile_tables.load(profile_tables.PROFILES)[0]
    }
