"""Fairness by hand: Jain's index, and what a user would have had on a share of their own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma_lab.reports.fairness import fairness, finish_times, jain, on_a_share
from lab_fixtures.recorded_runs import task


def test_jain_is_one_for_equals_and_one_nth_for_one_who_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 3.0]) == pytest.approx(16 / 20)
    assert jain([1.0, None]) is None
    assert jain([0.0, 0.0]) is None


def test_a_whole_share_serves_tasks_in_turn() -> None:
    assert on_a_share([(0.0, 1, 100.0), (0.0, 1, 50.0), (400.0, 1, 10.0)], 1.0) == [100.0, 150.0, 410.0]


def test_two_gpus_serve_two_at_once() -> None:
    assert on_a_share([(0.0, 1, 100.0), (10.0, 1, 50.0), (20.0, 1, 40.0)], 2.0) == [100.0, 60.0, 100.0]


def test_a_task_that_gets_less_than_it_asked_for_goes_slower() -> None:
    assert on_a_share([(0.0, 1, 100.0)], 0.5) == [200.0]
    assert on_a_share([(5.0, 2, 100.0)], 1.0) == [205.0]
    # One and a half GPUs: the second has half a GPU until the first has gone.
    assert on_a_share([(0.0, 1, 100.0), (0.0, 1, 100.0)], 1.5) == [100.0, 150.0]


def test_who_comes_while_others_are_served_waits_for_them() -> None:
    assert on_a_share([(0.0, 1, 100.0), (30.0, 1, 20.0), (60.0, 1, 5.0)], 1.0) == [100.0, 120.0, 125.0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.integers(1, 4), st.floats(0.001, 1e5)), min_size=1, max_size=12),
    st.floats(0.05, 8.0),
)
def test_a_share_always_ends_and_is_never_faster_than_it_can_be(
    work: list[tuple[float, int, float]], share: float
) -> None:
    work = sorted(work)
    ends = on_a_share(work, share)
    for (arrival_s, gpus, seconds), end in zip(work, ends, strict=True):
        assert end >= arrival_s + seconds * max(1.0, gpus / share) - 1e-3
    gpu_s = sum(gpus * seconds for _, gpus, seconds in work)
    assert max(ends) - work[0][0] >= gpu_s / share - 1e-2 - 1e-6 * gpu_s


def test_finish_time_fairness_is_completion_over_that_on_a_share() -> None:
    """Two users, two GPUs: one each. Ana's second task would have ended at 200, and did at 150."""
    ana = [task(1, 0.0, 0.0, 100.0), task(2, 0.0, 50.0, 150.0, gpu=1)]
    assert finish_times(ana, 1.0) == [1.0, 0.75]
    assert finish_times([*ana, task(3, 0.0, 0.0, 1.0, alone_s=None)], 1.0) == []


def test_users_are_distinguished_and_compared() -> None:
    tasks = [
        task(1, 0.0, 0.0, 100.0, user="ana"),
        task(2, 0.0, 50.0, 150.0, user="ana", gpu=1),
        task(3, 0.0, 150.0, 300.0, user="ben"),
    ]
    found = fairness(tasks, gpus=2)
    assert found is not None
    ana, ben = found.users
    assert (ana.user, ana.tasks, ana.gpu_s, ana.wait_mean_s, ana.slowdown_mean) == ("ana", 2, 200.0, 25.0, 1.0)
    assert (ana.finish_time_mean, ana.finish_time_max) == (0.875, 1.0)
    assert (ben.tasks, ben.wait_mean_s, ben.slowdown_mean, ben.finish_time_mean) == (1, 150.0, 1.5, 3.0)
    assert found.jain_finish_time == jain([0.875, 3.0])
    assert found.jain_slowdown == jain([1.0, 1.5])
    assert found.jain_service == jain([200.0, 150.0])
    assert found.finish_time_max == 3.0


def test_with_one_user_there_are_no_fairness_figures() -> None:
    assert fairness([task(1, 0.0, 0.0, 1.0), task(2, 0.0, 0.0, 1.0)], 2) is None
    assert fairness([], 2) is None


def test_where_no_run_alone_is_known_only_gpu_time_is_compared() -> None:
    tasks = [
        task(1, 0.0, 0.0, 10.0, user="ana", alone_s=None),
        task(2, 0.0, 0.0, 30.0, user="ben", alone_s=None),
    ]
    found = fairness(tasks, 1)
    assert found is not None
    assert (found.jain_finish_time, found.jain_slowdown) == (None, None)
    assert found.jain_service == pytest.approx(0.8)
