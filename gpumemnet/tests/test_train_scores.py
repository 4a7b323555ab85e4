"""Scores: what they count, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gpumemnet.training.scores import errors, judge, to_classes, top_merged


def test_a_class_holds_its_lower_edge() -> None:
    assert to_classes(np.array([0.0, 999.9, 1_000.0, 7_999.0, 8_000.0]), 1).tolist() == [0, 0, 1, 7, 8]
    assert to_classes(np.array([7_999.0, 8_000.0]), 8).tolist() == [0, 1]


def test_right_under_and_over() -> None:
    truth, found = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 0, 2, 1])
    score = judge(truth, found, 8, merged=False)
    assert (score.accuracy, score.under, score.over) == pytest.approx((3 / 6, 2 / 6, 1 / 6))
    assert score.off_by_more == pytest.approx(1 / 6)
    assert score.confusion == ((1, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0))
    assert [one.from_gb for one in score.by_class] == [0, 8, 16, 24]
    second, last = score.by_class[1], score.by_class[3]
    assert (second.precision, second.recall) == pytest.approx((1 / 3, 1 / 2))
    assert (last.precision, last.recall, last.f1) == (None, 0.0, 0.0)
    assert score.macro_f1 == pytest.approx((1 / 2 + 2 / 5 + 1 + 0) / 4)


def test_a_class_that_only_answers_name_has_no_say_in_the_mean() -> None:
    score = judge(np.array([0, 0, 0]), np.array([0, 0, 4]), 1, merged=False)
    assert score.macro_f1 == pytest.approx(0.8)
    assert score.by_class[1].recall is None


def test_from_40_gb_on_all_is_one_class() -> None:
    assert top_merged(np.array([4, 5, 9, 17]), 8).tolist() == [4, 5, 5, 5]
    truth, found = np.array([4, 6, 17]), np.array([4, 9, 5])
    assert judge(truth, found, 8, merged=False).accuracy == pytest.approx(1 / 3)
    assert judge(truth, found, 8, merged=True).accuracy == 1.0


def test_errors_in_mib_and_as_a_share() -> None:
    found = errors(np.array([110.0, 150.0, 300.0]), np.array([100.0, 200.0, 300.0]))
    assert (found.mean_mib, found.worst_under_mib, found.worst_over_mib) == (20.0, -50.0, 10.0)
    assert found.mean_share == pytest.approx((0.1 + 0.25) / 3)
    assert found.median_share == pytest.approx(0.1)
