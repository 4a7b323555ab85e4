"""The window and its risk formula, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest

from carma.core.model.values import Activity, GpuId, GpuSample
from carma.core.telemetry.window import Window, quantile, summarise


def sample(at: float, sm: float | None, **more: float | None) -> GpuSample:
    return GpuSample(gpu=GpuId("GPU-0"), at=at, activity=Activity(sm_active=sm, **more))


def window(*values: float | None, length_s: float = 30.0) -> Window:
    found = Window(length_s)
    for second, value in enumerate(values):
        found.add(sample(1_000.0 + second, value))
    return found


def test_the_risk_formula_gives_the_figures_worked_out_by_hand() -> None:
    # p95: position 4 * .95 = 3.8, between .8 and 1.0: .8 + .8 * .2 = .96
    values = [0.0, 0.2, 0.5, 0.8, 1.0]
    found = summarise(values)
    assert found.mean == pytest.approx(0.5)
    assert found.p95 == pytest.approx(0.96)
    # EMA, factor 2 / 6 = 1/3: 0 -> .0667 -> .2111 -> .4074 -> .6049
    # .20 * .5 + .20 * .5 + .30 * .96 + .10 * .5 + .20 * .604938
    assert found.risk == pytest.approx(0.658988, abs=1e-6)


def test_a_steady_metric_has_its_own_value_as_risk() -> None:
    found = summarise([0.4] * 30)
    assert (found.risk, found.p95, found.mean) == pytest.approx((0.4, 0.4, 0.4))


def test_one_sample_is_its_own_summary() -> None:
    found = summarise([0.7])
    assert (found.mean, found.p95, found.risk) == pytest.approx((0.7, 0.7, 0.7))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_quantiles_are_interpolated_as_numpy_does(share: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(expected)


def test_samples_older_than_the_window_leave_it() -> None:
    found = window(*[0.9] * 10, *[0.1] * 31)  # seconds 0 to 40; 30 s back from 40 is 10
    summary = found.gauges()["sm_active"]
    assert len(found.samples) == 31
    assert summary.p95 == pytest.approx(0.1)


def test_a_sample_that_is_not_newer_is_ignored() -> None:
    found = window(0.1, 0.2)
    found.add(sample(1_001.0, 0.9))
    found.add(sample(1_000.5, 0.9))
    assert len(found.samples) == 2
    assert found.gauges()["sm_active"].mean == pytest.approx(0.15)
    assert found.newest is not None
    assert found.newest.activity.sm_active == 0.2


def test_samples_before_the_last_start_do_not_count() -> None:
    found = window(0.9, 0.9, 0.1, 0.1)
    assert found.gauges(1_001.0)["sm_active"].mean == pytest.approx(0.1)
    assert found.count_since(1_001.0) == 2
    assert "sm_active" not in found.gauges(1_003.0)


@pytest.mark.parametrize("absent", [None, math.nan, -1.0, math.inf])
def test_a_metric_that_the_newest_sample_does_not_give_has_no_summary(absent: float | None) -> None:
    assert "sm_active" not in window(0.1, 0.1, absent).gauges()
    assert window(0.1, absent, 0.3).gauges()["sm_active"].mean == pytest.approx(0.2)


def test_a_new_sample_makes_a_new_summary() -> None:
    found = window(0.1)
    first = found.gauges()["sm_active"]
    found.add(sample(1_001.0, 0.9))
    assert first.mean != found.gauges()["sm_active"].mean
