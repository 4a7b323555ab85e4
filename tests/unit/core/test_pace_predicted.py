"""A demand that was only predicted: believed until the task was seen alone, and never held against its neighbours."""

from __future__ import annotations

import pytest

from carma.core.telemetry.pace import CALM_S
from tests.unit.core.pace_world import FULL, GPU0, HALF, begin, believed, world


def test_what_was_only_predicted_gives_way_to_what_is_seen_alone_and_not_to_what_is_made_of_it_beside_others() -> None:
    made = world()
    task = begin(made, HALF, predicted=True)
    made.activity[GPU0] = (0.45, 0.2, 0.2)
    made.wait(CALM_S)
    assert believed(made, task) == HALF
    made.wait(90.0)
    found = believed(made, task)
    assert found is not None
    assert found.sm_active == pytest.approx(0.45, abs=0.01)
    crowd = world()
    one, _ = begin(crowd, HALF, predicted=True), begin(crowd, FULL)
    crowd.activity[GPU0] = (0.6, 0.2, 0.2)
    crowd.wait(90.0)
    assert believed(crowd, one) == HALF


def test_an_unpredicted_idle_task_does_not_count_as_a_slow_neighbour() -> None:
    made = world()
    begin(made, HALF, predicted=True)
    begin(made, FULL)
    made.activity[GPU0] = (0.05, 0.02, 0.02)
    made.wait(100.0)
    assert made.state.live_of(GPU0).activity_ratio == 1.0
