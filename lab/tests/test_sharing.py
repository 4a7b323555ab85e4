"""The sharing model: what must hold whatever its constants, and the measurements that they come from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, quantiles
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing
from carma.core.scheduling.sharing_model import UNKNOWN, activity, progress_rates
from lab.tools import sharing_data, sharing_forms

SHARE = st.floats(min_value=0.0, max_value=1.0)
DEMAND = st.builds(Demand, SHARE, SHARE, SHARE, st.none() | SHARE, st.none() | SHARE)
MECHANISM = st.sampled_from(["mps", "timeslice"])
Mechanism = Literal["mps", "timeslice"]
RESULTS = Path(__file__).parents[2] / "lab" / "results" / "h200"
DEMANDS = st.lists(DEMAND, min_size=1, max_size=8)

SMALL = Demand(0.125, 0.03, 0.04)
AVERAGE = Demand(0.42, 0.19, 0.26)
HEAVY = Demand(0.9, 0.4, 0.5)


def test_alone_a_task_runs_at_its_own_speed_and_an_empty_gpu_shows_nothing() -> None:
    assert progress_rates([HEAVY]) == (1.0,)
    assert activity([HEAVY]) == HEAVY
    assert progress_rates([]) == ()
    assert activity([]) == Demand(0.0, 0.0, 0.0)


@given(DEMANDS, MECHANISM)
def test_rates_are_above_zero_and_at_most_one(demands: list[Demand], mechanism: Mechanism) -> None:
    rates = progress_rates(demands, mechanism)
    assert len(rates) == len(demands)
    assert all(0.0 < rate <= 1.0 for rate in rates)


@given(DEMANDS)
def test_mps_never_loses_to_taking_turns_and_slices_lose_what_switching_costs(demands: list[Demand]) -> None:
    assert sum(progress_rates(demands)) >= 1.0 - 1e-9
    assert sum(progress_rates(demands, "timeslice")) >= sharing.SLICES - 1e-9


@given(DEMANDS, DEMAND, MECHANISM)
def test_a_neighbour_never_makes_a_task_faster(demands: list[Demand], newcomer: Demand, mechanism: Mechanism) -> None:
    before = progress_rates(demands, mechanism)
    after = progress_rates([*demands, newcomer], mechanism)
    assert all(new <= old + 1e-12 for old, new in zip(before, after, strict=False))


@given(DEMANDS, DEMAND, MECHANISM)
def test_nor_in_a_cautious_guess(demands: list[Demand], newcomer: Demand, mechanism: Mechanism) -> None:
    before = progress_rates(demands, mechanism, cautious=True)
    after = progress_rates([*demands, newcomer], mechanism, cautious=True)
    assert all(new <= old + 1e-12 for old, new in zip(before, after, strict=False))


@given(DEMANDS, MECHANISM)
def test_a_cautious_guess_is_lower_but_for_a_task_alone(demands: list[Demand], mechanism: Mechanism) -> None:
    rates, cautious = progress_rates(demands, mechanism), progress_rates(demands, mechanism, cautious=True)
    if len(demands) == 1:
        assert cautious == (1.0,)
    else:
        assert all(0.0 < low < rate for low, rate in zip(cautious, rates, strict=True))


@given(st.lists(DEMAND, min_size=2, max_size=5), st.data(), MECHANISM, st.booleans())
def test_a_neighbour_with_more_demand_helps_no_other_task(
    demands: list[Demand], data: st.DataObject, mechanism: Mechanism, cautious: bool
) -> None:
    *others, greedy = demands
    more = {
        name: data.draw(st.floats(min_value=value, max_value=1.0))
        for name in ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power")
        if (value := getattr(greedy, name)) is not None
    }
    before = progress_rates(demands, mechanism, cautious)[:-1]
    after = progress_rates([*others, msgspec.structs.replace(greedy, **more)], mechanism, cautious)[:-1]
    assert all(new <= old + 1e-12 for old, new in zip(before, after, strict=True))


@given(st.lists(DEMAND, min_size=2, max_size=5), SHARE, MECHANISM, st.booleans())
def test_a_task_that_keeps_the_engine_busier_is_no_faster_itself(
    demands: list[Demand], engine: float, mechanism: Mechanism, cautious: bool
) -> None:
    first, *others = demands
    less, more = (msgspec.structs.replace(first, gr_active=value) for value in sorted((engine, first.gr_active or 0.0)))
    slow, fast = (progress_rates([one, *others], mechanism, cautious)[0] for one in (more, less))
    assert slow <= fast + 1e-12


@given(DEMANDS)
def test_activity_stays_a_share(demands: list[Demand]) -> None:
    shown = activity(demands)
    assert all(0.0 <= value <= 1.0 for value in (shown.sm_active, shown.sm_occupancy, shown.dram_active))


@given(st.permutations([SMALL, AVERAGE, HEAVY, AVERAGE]))
def test_the_order_of_tasks_does_not_matter(demands: list[Demand]) -> None:
    rates = sorted(progress_rates(demands))
    assert rates == pytest.approx(sorted(progress_rates([SMALL, AVERAGE, HEAVY, AVERAGE])))


def test_small_tasks_hardly_disturb_one_another() -> None:
    assert sum(progress_rates([SMALL, SMALL])) == pytest.approx(2.0, abs=0.05)
    assert sum(progress_rates([SMALL] * 8)) == pytest.approx(7.25, abs=0.5), "eight copies of a small task, H200"


def test_large_pairs_gain_a_little_and_lose_in_slices() -> None:
    assert 1.13 <= sum(progress_rates([HEAVY, HEAVY])) <= 1.18, "published for an A100, and seen on an H200"
    assert sum(progress_rates([HEAVY, HEAVY], "timeslice")) == pytest.approx(0.91, abs=0.05)


def test_a_small_task_suffers_more_beside_heavy_ones_than_they_do() -> None:
    small, heavy = progress_rates([SMALL, HEAVY])
    assert small < heavy
    assert 1 / progress_rates([SMALL, HEAVY, HEAVY])[0] >= 2.0
    assert 1 / progress_rates([SMALL, HEAVY, HEAVY, HEAVY])[0] >= 3.0


def test_slack_hides_what_others_take() -> None:
    """The same kernels, once in a task that waits for its data loader most of the time."""
    held_back = Demand(0.2, 0.1, 0.1, gr_active=0.25, power=0.2)
    busy = Demand(0.2, 0.1, 0.1, gr_active=1.0, power=0.2)
    assert progress_rates([held_back, AVERAGE])[0] > 0.98
    assert progress_rates([busy, AVERAGE])[0] < 0.8


def test_slices_are_fair_parts_of_the_time() -> None:
    light, greedy = Demand(0.1, 0.05, 0.0, gr_active=0.175), Demand(0.9, 0.4, 0.3, gr_active=1.0)
    assert progress_rates([light, greedy, greedy], "timeslice") == pytest.approx((1.0, 0.35, 0.35))


def test_an_unknown_demand_counts_as_the_worst_case() -> None:
    unknown = Demand(math.nan, math.nan, math.nan)
    assert progress_rates([AVERAGE, unknown])[0] == progress_rates([AVERAGE, Demand(1.0, 1.0, 1.0)])[0]


def test_a_task_of_which_nothing_is_known_presses_as_nine_in_ten_do_at_most_and_fares_as_the_worst_tenth() -> None:
    assert progress_rates([AVERAGE, None]) == progress_rates([AVERAGE, UNKNOWN])
    assert progress_rates([None, AVERAGE], "timeslice") == progress_rates([UNKNOWN, AVERAGE], "timeslice")
    assert progress_rates([None]) == (1.0,)
    assert progress_rates([SMALL, None])[0] < progress_rates([SMALL, AVERAGE])[0]


def test_a_width_that_is_not_known_is_no_shield() -> None:
    unknown, wide = (Demand(sm, 0.2, 0.2, gr_active=1.0, power=0.5) for sm in (math.nan, 1.0))
    assert progress_rates([unknown, AVERAGE])[0] < progress_rates([wide, AVERAGE])[0]


def test_the_constants_are_those_that_the_fit_found() -> None:
    found = json.loads((RESULTS / "sharing.json").read_text())
    assert pytest.approx(found["mps"]["fitted_on_both"], rel=0.01) == [sharing.PRESS, sharing.CROWD, sharing.WIDTH]
    assert pytest.approx(found["timeslice"]["fitted"][0], rel=0.01) == sharing.SLICES
    guesses = [sharing.ENGINE_ABOVE_SM, sharing.POWER_OF_SM, sharing.POWER_OF_DRAM]
    assert guesses == pytest.approx(list(found["guesses"].values()), rel=0.01)
    unseen = found["mps"]["this"]
    assert unseen["mae"] <= 0.08
    assert unseen["p90"] <= 0.16


def test_the_model_as_shipped_is_near_every_measured_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_data, "FOLDER", RESULTS)
    groups = sharing_data.load(sharing_data.MPS)
    assert len(groups) >= 150
    errors = [
        abs(said - was)
        for group in groups
        for said, was in zip(progress_rates(group.demands), group.rates, strict=True)
    ]
    assert mean(errors) <= 0.07
    assert quantiles(errors, n=10)[-1] <= 0.14


def test_a_fit_finds_the_constants_that_made_the_table() -> None:
    made = (0.4, 2.0, 3.0)
    demands = [(SMALL, HEAVY), (AVERAGE, AVERAGE), (AVERAGE, HEAVY), (SMALL, AVERAGE, HEAVY), (SMALL, SMALL, AVERAGE)]
    groups = [sharing_data.Group(tuple("abc"[: len(group)]), group, (0.0,) * len(group)) for group in demands]
    blank = sharing_forms.table(groups)
    form = sharing_forms.MPS["press and crowd"]
    rates = blank._replace(was=form.says(made, blank))
    assert form.says(sharing_forms.fit(form, rates), rates) == pytest.approx(rates.was, abs=0.02)
