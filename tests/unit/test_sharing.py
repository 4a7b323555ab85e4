"""The sharing model: what must hold whatever its constants, and the published figures that they are set by."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.core.model import Demand
from carma.core.sharing import activity, progress_rates

SHARE = st.floats(min_value=0.0, max_value=1.0)
DEMAND = st.builds(Demand, SHARE, SHARE, SHARE)
DEMANDS = st.lists(DEMAND, min_size=1, max_size=8)

SMALL = Demand(0.125, 0.03, 0.04)
AVERAGE = Demand(0.42, 0.19, 0.26)
HEAVY = Demand(0.9, 0.4, 0.5)


def test_alone_a_task_runs_at_its_own_speed_and_an_empty_gpu_shows_nothing() -> None:
    assert progress_rates([HEAVY]) == (1.0,)
    assert activity([HEAVY]) == HEAVY
    assert progress_rates([]) == ()
    assert activity([]) == Demand(0.0, 0.0, 0.0)


@given(DEMANDS)
def test_rates_are_above_zero_and_at_most_one_and_sharing_never_loses_to_taking_turns(demands: list[Demand]) -> None:
    rates = progress_rates(demands)
    assert len(rates) == len(demands)
    assert all(0.0 < rate <= 1.0 for rate in rates)
    assert sum(rates) >= 1.0 - 1e-9


@given(DEMANDS, DEMAND)
def test_a_neighbour_never_makes_a_task_faster(demands: list[Demand], newcomer: Demand) -> None:
    before = progress_rates(demands)
    after = progress_rates([*demands, newcomer])
    assert all(new <= old + 1e-12 for old, new in zip(before, after, strict=False))


@given(DEMANDS)
def test_activity_stays_a_share(demands: list[Demand]) -> None:
    shown = activity(demands)
    assert all(0.0 <= value <= 1.0 for value in (shown.sm_active, shown.sm_occupancy, shown.dram_active))


@given(st.permutations([SMALL, AVERAGE, HEAVY, AVERAGE]))
def test_the_order_of_tasks_does_not_matter(demands: list[Demand]) -> None:
    rates = sorted(progress_rates(demands))
    assert rates == pytest.approx(sorted(progress_rates([SMALL, AVERAGE, HEAVY, AVERAGE])))


def test_small_tasks_hardly_disturb_one_another() -> None:
    assert sum(progress_rates([SMALL, SMALL])) == pytest.approx(2.0, abs=0.15)
    assert 3.0 <= sum(progress_rates([SMALL] * 4)) <= 4.24  # measured: 4.24, and the prior is on the slow side


def test_average_pairs_are_near_the_published_total_and_activity() -> None:
    assert sum(progress_rates([AVERAGE, AVERAGE])) == pytest.approx(1.5, abs=0.1)
    shown = activity([AVERAGE, AVERAGE])
    assert shown.sm_active == pytest.approx(0.638, abs=0.03)
    assert shown.sm_occupancy == pytest.approx(0.302, abs=0.03)
    assert shown.dram_active == pytest.approx(0.382, abs=0.03)


def test_large_pairs_gain_a_little() -> None:
    assert 1.05 <= sum(progress_rates([HEAVY, HEAVY])) <= 1.18


def test_a_small_task_suffers_more_beside_a_heavy_one_than_the_heavy_one_does() -> None:
    small, heavy = progress_rates([SMALL, HEAVY])
    assert 1.5 <= 1 / small <= 2.3
    assert 1 / heavy < 1.2


def test_an_unknown_demand_counts_as_the_worst_case() -> None:
    unknown = Demand(math.nan, math.nan, math.nan)
    assert progress_rates([AVERAGE, unknown])[0] == progress_rates([AVERAGE, Demand(1.0, 1.0, 1.0)])[0]


def test_groups_are_not_promised_more_than_was_measured() -> None:
    """H200, medians of mixed groups under MPS: 1.48 and 1.62 in total; the worst-off slowed 3.1 and 4.1 times."""
    assert 1.3 <= sum(progress_rates([AVERAGE] * 3)) <= 1.65
    assert 1.3 <= sum(progress_rates([AVERAGE] * 4)) <= 1.65
    assert 1 / progress_rates([SMALL, HEAVY, HEAVY])[0] >= 2.5
    assert 1 / progress_rates([SMALL, HEAVY, HEAVY, HEAVY])[0] >= 3.5
