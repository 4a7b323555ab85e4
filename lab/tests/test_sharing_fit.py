"""The fit of the sharing model: its forms are those of the core, its bands hold what they say, and the constants that
ship are those that it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing
from carma.core.scheduling.sharing_model import Mechanism, progress_rates
from lab.tools import sharing_data, sharing_fit, sharing_forms, sharing_outside
from lab.tools.sharing_data import Group
from lab.tools.sharing_forms import Rates, left_out, table

ROOT = Path(__file__).parents[2]
FOUND: dict[str, Any] = json.loads((ROOT / "lab" / "results" / "simulation" / "sharing.json").read_text())
KEPT: dict[Mechanism, tuple[sharing_forms.Form, tuple[float, ...]]] = {
    "mps": (sharing_forms.MPS["press and crowd"], (sharing.PRESS, sharing.CROWD, sharing.WIDTH)),
    "timeslice": (sharing_forms.SLICES["fair parts"], (sharing.SLICES,)),
}


@pytest.fixture(autouse=True)
def _from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_data, "FOLDER", ROOT / "lab" / "results" / "h200")
    monkeypatch.setattr(sharing_outside, "FOLDER", ROOT / "lab" / "results" / "h200")


@pytest.fixture
def groups() -> list[Group]:
    return sharing_data.load(sharing_data.MPS)


@pytest.mark.parametrize("mechanism", ["mps", "timeslice"])
def test_the_kept_forms_are_those_of_the_core(groups: list[Group], mechanism: Mechanism) -> None:
    form, constants = KEPT[mechanism]
    for known in (groups, [sharing_data.without(group) for group in groups]):
        core = [rate for group in known for rate in progress_rates(group.demands, mechanism)]
        assert form.says(constants, table(known)) == pytest.approx(core, abs=1e-9)


@pytest.mark.parametrize("mechanism", ["mps", "timeslice"])
def test_the_constants_that_ship_are_those_that_were_found(mechanism: Mechanism) -> None:
    found = FOUND[mechanism]
    form = found["forms"][found["kept"]]
    assert list(KEPT[mechanism][1]) == pytest.approx(form["constants"], rel=0.001)
    caution = found["of_the_cautious"]["caution"]
    for pair, name in zip(sharing.CAUTION[mechanism], ("known", "guessed"), strict=True):
        assert list(pair) == pytest.approx(caution[name], abs=0.0006)
    spread = {int(size): tuple(pair) for size, pair in found["of_the_cautious"]["spread"].items()}
    assert sharing.SPREAD[mechanism].keys() == spread.keys()
    for size, pair in spread.items():
        assert sharing.SPREAD[mechanism][size] == pytest.approx(pair, abs=0.0006)


def test_who_is_not_known_ships_as_found() -> None:
    prior = FOUND["unknown"]
    for name in ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power"):
        assert getattr(sharing.UNKNOWN, name) == pytest.approx(prior[name], abs=0.005)


@pytest.mark.parametrize("mechanism", ["mps", "timeslice"])
def test_the_kept_form_is_the_best_on_tasks_left_out(mechanism: Mechanism) -> None:
    found = FOUND[mechanism]
    errors = {name: form["left_out"]["all"]["mean_abs"] for name, form in found["forms"].items()}
    assert errors[found["kept"]] == pytest.approx(min(errors.values()), abs=0.0005)


def test_the_band_holds_for_each_number_of_tasks() -> None:
    for mechanism in ("mps", "timeslice"):
        caution = FOUND[mechanism]["of_the_cautious"]["caution"]
        assert min(caution["kept_to"].values()) >= 0.9
        assert min(caution["kept_to_where_guessed"].values()) >= 0.9
        assert caution["kept_to_by_a_band_made_without_the_task"] >= 0.88


def test_a_task_that_is_left_out_has_no_part_in_the_fit() -> None:
    """One task goes by a rule of its own; what is predicted of it must not change with what was measured of it."""
    light, heavy = Demand(0.2, 0.1, 0.1, 0.4, 0.2), Demand(0.8, 0.4, 0.3, 0.9, 0.7)
    plain = [Group(("a", "b"), (light, heavy), (0.9, 0.8)), Group(("b", "c"), (heavy, heavy), (0.6, 0.6))]
    form = sharing_forms.MPS["additive"]
    predicted = []
    for odd in (0.3, 1.0):
        rates = table([*plain, Group(("a", "odd"), (light, heavy), (odd, odd))])
        out = left_out(form, rates)
        predicted.append(out[rates.task == "odd"][0])
    assert predicted[0] == predicted[1]


def _made(count: int, sigma: float, size: int = 2) -> tuple[np.ndarray[Any, Any], Rates]:
    """Rates that lie about what is predicted by a known spread."""
    random = np.random.default_rng(3)
    predicted = random.uniform(0.3, 0.7, count)
    was = predicted * np.exp(sigma * random.standard_normal(count))
    empty = np.zeros((count, 5))
    names = np.array([f"t{place % 9}" for place in range(count)])
    rates = Rates(empty, empty, empty, np.full(count, float(size)), was, names, np.arange(count), [frozenset()] * count)
    return predicted, rates


def test_the_spread_is_found_again() -> None:
    predicted, rates = _made(4000, 0.1)
    least, slope = sharing_fit.spread(predicted, rates)
    assert least + slope * 0.5 == pytest.approx(0.1, rel=0.05)


def test_one_in_ten_is_slower_than_the_cautious_rate() -> None:
    predicted, rates = _made(4000, 0.1)
    least, slope = sharing_fit.caution(predicted, rates)
    assert least + slope * 0.5 == pytest.approx(1.2816 * 0.1, rel=0.06), "the tenth part of a normal distribution"
    holds = rates.was >= predicted * np.exp(-(least + slope * (1.0 - predicted)))
    assert holds.mean() == pytest.approx(0.9, abs=0.01)


def test_what_two_copies_do_tells_what_one_asks_for() -> None:
    for mechanism in ("mps", "timeslice"):
        demand = sharing_outside.matched(0.7, mechanism)
        assert progress_rates([demand, demand], mechanism)[0] == pytest.approx(0.7, abs=1e-6)


def test_what_is_said_of_other_data_is_what_the_model_says_now() -> None:
    """What comes with CARMA can be judged again; Gavel's and MISO's tables do not."""
    again = json.loads(json.dumps(sharing_outside.validation(None)))
    assert set(again) == {"h200_collocation", "lucid"}
    assert {name: FOUND["validation"][name] for name in again} == again


def test_the_tables_of_gavel_are_read_and_pairs_that_do_not_fit_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(
        "table,gpu_type,job_a,gpus_a,job_b,steps_per_s_a_alone,norm_a\n"
        "simulation,v100,A,1,A,4.0,0.75\nsimulation,v100,A,1,B,4.0,0.0\nsimulation,v100,B,1,A,2.0,1.25\n"
        "simulation,k80,A,1,A,1.0,0.5\nphysical_cluster,v100,A,1,A,4.0,0.9\nsimulation,v100,A,2,A,8.0,0.4\n"
    )
    pairs, alone = sharing_outside.gavel(path)
    assert pairs == {("A", "A"): 0.75, ("B", "A"): 1.0}
    assert alone == {"A": 4.0, "B": 2.0}
