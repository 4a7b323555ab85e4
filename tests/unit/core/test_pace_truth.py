"""The predicted rates of tasks that share a GPU, compared with what the GPU shows."""

from __future__ import annotations

import pytest

from carma.core.model.decision import Ask
from carma.core.model.values import Demand, TaskId
from carma.core.policies import goodput
from carma.core.scheduling.sharing_model import progress_rates
from carma.core.telemetry.pace import BELIEVED_S, CALM_S
from tests.unit.core.pace_world import FULL, GPU0, GPU1, HALF, OPEN, begin, track_of, world


def test_where_less_is_seen_than_was_predicted_progress_is_less() -> None:
    made = world()
    one, two = begin(made, HALF, 1_000.0), begin(made, FULL, 1_000.0)
    rates = progress_rates([HALF, FULL])
    predicted = min(1.0, sum(demand.sm_active * rate for demand, rate in zip((HALF, FULL), rates, strict=True)))
    made.activity[GPU0] = (0.5 * predicted, 0.2, 0.2)
    made.wait(150.0)
    live = made.state.live_of(GPU0)
    assert live.activity_ratio == pytest.approx(0.5, abs=0.02)
    before_s = track_of(made, one).done_s
    paced_at, now = track_of(made, one).paced_at, made.now
    made.end(two)
    assert track_of(made, one).done_s == pytest.approx(before_s + (now - paced_at) * rates[0] * 0.5, rel=0.05)
    assert live.activity_ratio == 1.0, "of others than these nothing was seen"


def test_a_gpu_that_shows_nothing_does_not_stop_its_tasks_for_ever() -> None:
    """Both may wait for data: a policy must still be able to say how long they would take."""
    made = world()
    one, _ = begin(made, HALF, 1_000.0), begin(made, FULL, 1_000.0)
    made.activity[GPU0] = (0.0, 0.0, 0.0)
    made.wait(600.0)
    assert made.state.live_of(GPU0).activity_ratio == pytest.approx(0.05, abs=0.01)
    newcomer = Ask(task=TaskId(9), gpus=1, memory_mib=1_000, source="declared", demand=HALF, alone_s=100.0, at=made.now)
    view = made.view(0)
    assert track_of(made, one).rate > 0.0
    assert goodput.bound(OPEN).refusal(newcomer, view.holders) is not None


def test_a_task_slowed_down_on_another_gpu_has_no_neighbour_where_it_is_alone() -> None:
    made = world(2)
    begin(made, FULL)
    made.wait(1)
    wide = begin(made, FULL, gpus=2)
    slowed = track_of(made, wide).rate
    made.activity[GPU1] = (FULL.sm_active * slowed, FULL.sm_occupancy * slowed, FULL.dram_active * slowed)
    made.wait(CALM_S + 3 * BELIEVED_S)
    made.activity[GPU1] = (0.0, 0.0, 0.0)
    made.wait(10.0)
    assert slowed < 1.0
    assert made.state.live_of(GPU1).activity_ratio == 1.0


def test_no_task_is_faster_than_alone() -> None:
    made = world()
    one, _ = begin(made, HALF), begin(made, Demand(0.1, 0.05, 0.05, 0.2, 0.1))
    made.activity[GPU0] = (1.0, 0.4, 0.4)
    made.wait(150.0)
    live = made.state.live_of(GPU0)
    assert live.activity_ratio * max(track_of(made, one).rates[GPU0], track_of(made, one).rate) <= 1.0 + 1e-9
    now = made.now
    track = track_of(made, one)
    track.advance_to(now, live.activity_ratio)
    assert track.done_s <= now - (track.began_at or 0.0) + 1e-9


@pytest.mark.parametrize("strange", ["a foreign process", "nothing known"])
def test_without_knowing_all_of_them_no_prediction_is_judged(strange: str) -> None:
    made = world()
    begin(made, HALF)
    begin(made, None if strange == "nothing known" else FULL)
    if strange == "a foreign process":
        made.foreign[GPU0] = 3_000
    made.activity[GPU0] = (0.05, 0.02, 0.02)
    made.wait(100.0)
    assert made.state.live_of(GPU0).activity_ratio == 1.0
