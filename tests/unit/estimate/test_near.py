"""Read off a line through measured runs: between them, a little beyond them, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.estimate.interpolation import Fit, MeasuredPoint, fit


def points(*pairs: tuple[float, int]) -> list[MeasuredPoint]:
    return [MeasuredPoint(value, mib) for value, mib in pairs]


def fitted(found: list[MeasuredPoint], value: float) -> Fit:
    answer = fit(found, value)
    assert isinstance(answer, Fit), answer
    return answer


LINE = points((16, 3_600), (32, 5_200), (64, 8_400), (128, 14_800))  # 2,000 + 100 a sample


def test_between_two_values_it_lies_on_the_line() -> None:
    answer = fitted(LINE, 48)
    assert answer.footprint_mib == 6_800
    assert answer.used == (MeasuredPoint(32, 5_200), MeasuredPoint(64, 8_400))
    assert not answer.beyond
    assert answer.upper_mib == 6_800 + 340  # leaving any of the points out, the others tell it exactly


def test_two_points_say_nothing_of_the_bend_between_them() -> None:
    answer = fitted(points((32, 5_200), (64, 8_400)), 48)
    assert answer.footprint_mib == 6_800
    assert answer.upper_mib == 8_400 + 420  # it may jump to the larger one's at once


def test_the_bound_covers_how_far_off_the_line_was_before() -> None:
    bent = points((10, 1_000), (20, 1_100), (40, 9_000), (80, 20_000))
    answer = fitted(bent, 30)
    assert answer.footprint_mib == 5_050
    assert answer.upper_mib == 9_000 + 450
    assert fitted(points((10, 1_000), (20, 2_000), (30, 3_300)), 15).upper_mib == 1_500 + 256 + 300


def test_of_several_runs_with_the_same_value_the_most_counts() -> None:
    assert fitted([*LINE, MeasuredPoint(64, 8_800)], 64).footprint_mib == 8_800


def test_below_the_smallest_it_is_not_drawn_on() -> None:
    answer = fitted(LINE, 2)
    assert (answer.footprint_mib, answer.upper_mib, answer.beyond) == (3_600, 3_856, True)


def test_above_the_largest_it_is_drawn_on_to_twice_as_far_with_a_wider_bound() -> None:
    answer = fitted(LINE, 256)
    assert answer.footprint_mib == 27_600
    assert answer.upper_mib == pytest.approx(1.05 * (14_800 + 1.25 * 12_800), abs=1)
    assert answer.beyond
    assert fit(LINE, 257) == "it is more than 2 times the largest value that was measured"


@pytest.mark.parametrize("second", [40, 64, 100])
def test_the_bound_beyond_holds_for_a_square(second: int) -> None:
    """Attention over a longer sequence."""

    def took(value: float) -> int:
        return round(2_000 + 0.5 * value**2)

    answer = fitted(points((second, took(second)), (128, took(128))), 256)
    assert answer.upper_mib >= took(256)


def test_it_refuses_what_goes_up_and_down() -> None:
    assert fit(points((1, 4_000), (2, 9_000), (3, 5_000)), 2.5) == "memory went up and down with it"


def test_a_little_noise_is_no_slope() -> None:
    answer = fitted(points((1, 4_000), (2, 3_900), (3, 4_050)), 2)
    assert answer.footprint_mib == 4_000


def test_where_more_of_it_means_less_it_answers_only_between() -> None:
    shards = points((1, 16_000), (2, 9_000), (4, 5_000))
    inside = fitted(shards, 3)
    assert inside.footprint_mib == 7_000
    assert inside.upper_mib >= 7_350
    for outside in (0.5, 8):
        assert "outside" in str(fit(shards, outside))


@pytest.mark.parametrize("found", [[], points((32, 5_000)), points((32, 5_000), (32, 6_000))])
def test_one_value_is_no_line(found: list[MeasuredPoint]) -> None:
    assert fit(found, 64) == "two other values must have been measured"


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100_000)), max_size=12),
    st.floats(-2e6, 2e6),
)
def test_whatever_was_measured_the_bound_is_above_the_figure(pairs: list[tuple[float, int]], value: float) -> None:
    answer = fit(points(*pairs), value)
    if isinstance(answer, Fit):
        assert 0 < answer.footprint_mib < answer.upper_mib
        assert answer.footprint_mib >= min(mib for _, mib in pairs)
