"""What is said of a run: spreads, outcomes, the course in few points."""

from __future__ import annotations

import pytest

from carma_lab.reports.figure_list import LINES, conditions, shown, title, value_of
from carma_lab.reports.summary import spread, summary, thinned
from carma_lab.runs.figures import Ran
from lab_fixtures.recorded_runs import about, point, run, task


def test_a_spread_is_mean_median_p95_and_most() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (5, 22.0, 3.0, 100.0)
    assert found.p95 == pytest.approx(4.0 + 0.8 * 96.0)
    assert spread([]) is None


def test_waiting_is_all_the_time_in_which_a_task_does_not_run() -> None:
    crash = Ran(gpus=(0,), placed_at=10.0, ended_at=15.0, outcome="out_of_memory", blame="neighbour")
    told = summary(run(task(1, 0.0, 20.0, 140.0, before=[crash])))
    assert told.wait_s is not None
    assert told.run_s is not None
    assert told.completion_s is not None
    assert told.slowdown is not None
    assert (told.wait_s.mean, told.run_s.mean, told.completion_s.mean, told.slowdown.mean) == (15.0, 120.0, 140.0, 1.2)
    assert told.outcomes == {"succeeded": 1}
    assert told.attempts == {"out_of_memory": 1, "succeeded": 1}
    assert (told.figures.ooms, told.figures.innocent_ooms, told.figures.wasted_gpu_s) == (1, 1, 5.0)


def test_an_unknown_slowdown_is_none_and_not_a_number() -> None:
    told = summary(run(task(1, 0.0, 0.0, 100.0, alone_s=None), task(2, 0.0, 0.0, 50.0, outcome="failed")))
    assert told.slowdown is None
    assert (told.figures.slowdown_mean, told.figures.slowdown_p95, told.figures.slowdown_max) == (None, None, None)
    assert told.fairness is None
    line = next(line for line in LINES if line.field == "slowdown_mean")
    assert shown(line, value_of(told.figures, line)) == "-"


def test_the_course_is_thinned_by_means_and_keeps_what_is_not_known() -> None:
    course = [point(30.0 * (place + 1), running=float(place), power_w=None) for place in range(10)]
    assert [(one.at_s, one.running) for one in thinned(course, 5)] == [
        (60.0, 0.5),
        (120.0, 2.5),
        (180.0, 4.5),
        (240.0, 6.5),
        (300.0, 8.5),
    ]
    assert all(one.power_w is None for one in thinned(course, 5))
    assert thinned(course, 50) == course
    assert thinned([], 5) == []


def test_a_run_says_what_it_was() -> None:
    assert title(about()) == "made under magm: 2 x card, simulated"
    assert conditions(about()) == "memory: measured, mechanism: mps"
    told = conditions(about(noise=0.1, seed=3, settings={"gate.enabled": "no"}))
    assert told == "memory: measured, mechanism: mps, noise 0.1, seed 3, gate.enabled = no"
