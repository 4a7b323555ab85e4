"""goodput's arithmetic, by hand: total run times, refusals of sharing with their reasons, and the order of tasks."""

from __future__ import annotations

from math import inf

import pytest

from carma.core.model.decision import Ask
from carma.core.model.values import AttemptKey, Demand, GpuId, TaskId
from carma.core.policies.goodput import MIN_GAIN
from carma.core.scheduling.forecast import Forecast, Sharer, Terms, slowdowns
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Waits
from carma.core.scheduling.sharing_model import typical
from carma.testing.builders import gpu
from tests.unit.core.goodput_world import (
    HEAVY,
    LIGHT,
    MEDIUM,
    MPS,
    NOW,
    ask,
    bound,
    forecast,
    goes,
    holder,
    rates_by_hand,
    sentence,
)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    rates_by_hand(monkeypatch)


@pytest.mark.usefixtures("by_hand")
def test_who_is_left_when_the_other_has_ended_goes_on_at_full_speed() -> None:
    # The newcomer ends after 100 / 0.8 = 125 s. The other has done 62.5 s of its work by then, and 37.5 s are left.
    found = forecast(ask(goes(0.8)), [holder(goes(0.5))], MPS)
    assert found.slowdowns == pytest.approx((1.625, 1.25))
    assert (found.own, found.worst) == pytest.approx((1.25, 1.625))
    assert found.gain == pytest.approx(0.5 + 0.8 - 1.0)


@pytest.mark.usefixtures("by_hand")
def test_the_time_alone_before_and_after_counts_too() -> None:
    # 900 s of 1,000 are done, alone: the last 100 take 200 s beside the newcomer, which then has 840 s to go alone.
    long = holder(goes(0.5), 1_000.0, done_s=900.0, ran_s=900.0)
    found = forecast(ask(goes(0.8), 1_000.0), [long], MPS)
    assert found.slowdowns == pytest.approx((1.1, 1.04))


@pytest.mark.usefixtures("by_hand")
def test_what_was_lost_before_is_not_forgotten() -> None:
    lame = holder(goes(1.0), 1_000.0, done_s=500.0, ran_s=700.0)
    assert forecast(ask(goes(1.0)), [lame], MPS).worst == pytest.approx(1.2)


@pytest.mark.usefixtures("by_hand")
def test_one_whose_end_is_not_known_goes_on_as_it_begins() -> None:
    found = forecast(ask(goes(0.8), 1_000.0), [holder(goes(0.5), None)], MPS)
    assert found.slowdowns == pytest.approx((2.0, 1.25)), "the ends are unknown, so neither ends before the other"
    found = forecast(ask(goes(0.8), None), [holder(goes(0.5), 100.0)], MPS)
    assert found.slowdowns == pytest.approx((2.0, 1.25))


@pytest.mark.usefixtures("by_hand")
def test_one_that_has_not_started_counts_from_its_placement() -> None:
    fresh = Holder(key=AttemptKey(TaskId(7), 1), booking_mib=1, ends_at=NOW, demand=goes(0.5), progress=None)
    assert forecast(ask(goes(0.8)), [fresh], MPS).slowdowns == pytest.approx((2.0, 1.25))


@pytest.mark.usefixtures("by_hand")
def test_who_is_held_up_on_another_gpu_goes_no_faster_here() -> None:
    # 0.6 all the way, also when it is alone here: 60 s done when the newcomer ends, 40 s at 0.6 after it.
    gang = holder(goes(0.9), elsewhere=0.6)
    found = forecast(ask(goes(1.0)), [gang], MPS)
    assert found.slowdowns == pytest.approx(((100 + 40 / 0.6) / 100, 1.0))
    assert found.gain == pytest.approx(1.0), "it made 0.6 before and makes 0.6 now"


@pytest.mark.usefixtures("by_hand")
def test_one_that_overran_may_end_at_any_time_and_is_late_already() -> None:
    late = holder(goes(0.5), 100.0, done_s=180.0, ran_s=180.0)
    found = forecast(ask(goes(0.8), 1_000.0), [late], MPS)
    assert found.slowdowns[0] == pytest.approx((180 + 1 / 0.5) / 100)


@pytest.mark.usefixtures("by_hand")
def test_three_leave_one_after_the_other() -> None:
    members = [Sharer(goes(0.5), 50.0), Sharer(goes(0.5), 100.0), Sharer(goes(0.5), inf)]
    # The first ends at 100 s, the second has 50 s left then and goes on at 0.5 beside the third.
    assert slowdowns(members, [0.5, 0.5, 0.5], "mps") == pytest.approx([2.0, 2.0, 2.0])
    members[2] = Sharer(goes(0.5), 60.0)
    # At 100 s: 50 and 10 s are left; the third ends at 120 s, and the second has 40 s to go alone.
    assert slowdowns(members, [0.5, 0.5, 0.5], "mps") == pytest.approx([2.0, 1.6, 2.0])


# -- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("by_hand")
def test_the_cap_is_on_the_whole_run_of_each() -> None:
    assert bound(1.63).refusal(ask(goes(0.8)), [holder(goes(0.5))]) is None
    assert "task 7 would take 1.62 times as long as alone (cap 1.6)" in sentence(
        bound(1.6), ask(goes(0.8)), holder(goes(0.5))
    )


@pytest.mark.usefixtures("by_hand")
def test_a_refusal_names_the_new_task_and_the_slowest_neighbour() -> None:
    told = sentence(bound(1.2), ask(goes(0.8)), holder(goes(0.9), task=3), holder(goes(0.5), task=4))
    assert "beside tasks 3, 4 it would take 1.25 times as long as alone" in told
    assert "task 4 1.6" in told
    assert "task 3 " not in told
    assert "(cap 1.2)" in told


@pytest.mark.parametrize("mib", [1_000, 2_000, 4_000, 8_000, 13_000])
def test_a_task_of_unknown_demand_counts_as_a_typical_one_of_its_memory_size(mib: int) -> None:
    newcomer = Ask(TaskId(9), 1, mib, "declared", False)
    known = Ask(TaskId(9), 1, mib, "declared", False, typical(mib))
    assert forecast(newcomer, [holder(MEDIUM)], MPS) == forecast(known, [holder(MEDIUM)], MPS)
    beside_unknown, beside_known = holder(None, mib=mib), holder(typical(mib), mib=mib)
    assert forecast(known, [beside_unknown], MPS).slowdowns == forecast(known, [beside_known], MPS).slowdowns


def test_the_limit_holds_for_a_bad_case_of_unknown_demands_only() -> None:
    """The expected slowdown is below the cap; what a demanding task of that size would cost decides."""
    newcomer = Ask(TaskId(9), 1, 4_000, "declared", False)
    neighbours = [holder(MEDIUM, None)]
    found = forecast(newcomer, neighbours, MPS)
    bad_case = forecast(newcomer, neighbours, Terms(MPS.cap, "mps", worst_case=True))
    assert found.worst < bad_case.worst
    between = (found.worst + bad_case.worst) / 2
    assert bound(found.worst + 0.01, limit=bad_case.worst + 0.01).refusal(newcomer, neighbours) is None
    told = sentence(bound(found.worst + 0.01, limit=between), newcomer, *neighbours)
    assert f"(limit {between:g}) if it is as demanding as the most demanding tenth of tasks of that size" in told
    known = Ask(TaskId(9), 1, 4_000, "declared", False, typical(4_000))
    assert bound(found.worst + 0.01, limit=between).refusal(known, neighbours) is None


def test_the_limit_is_never_below_the_cap() -> None:
    newcomer = Ask(TaskId(9), 1, 4_000, "declared", False)
    assert bound(9.0, limit=1.0).refusal(newcomer, [holder(MEDIUM, None)]) is None


@pytest.mark.usefixtures("by_hand")
def test_tasks_of_unknown_demand_are_named_in_a_refusal() -> None:
    told = sentence(bound(), ask(None), holder(goes(0.9), task=3), holder(None, task=4))
    assert "it and task 4 count as typical tasks of that size" in told
    assert "count" not in sentence(bound(), ask(goes(0.5)), holder(goes(0.5)))


@pytest.mark.usefixtures("by_hand")
def test_a_gain_that_is_too_small_is_not_worth_it() -> None:
    cap = 5.0
    enough = goes(0.5 + MIN_GAIN + 0.001)
    assert bound(cap).refusal(ask(enough), [holder(goes(0.5))]) is None
    assert "add 0.19 of a GPU's work" in sentence(bound(cap), ask(goes(0.5 + MIN_GAIN - 0.01)), holder(goes(0.5)))
    assert "less would be done in all" in sentence(bound(cap), ask(goes(0.4)), holder(goes(0.5)))


def test_no_task_is_refused_an_idle_gpu() -> None:
    assert bound(1.0).refusal(ask(None, None), ()) is None
    (ranked,) = bound(1.0).rank(ask(None, None), [GpuView(gpu=gpu(0))], None)
    assert [part.value for part in ranked.parts] == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("by_hand")
def test_progress_that_is_clearly_less_than_predicted_is_counted_on_for_nobody() -> None:
    # Alone on the GPU it should make 1 and is seen to make 0.5: a newcomer, too, would get half of what is predicted.
    slow = holder(goes(0.8), None, rate=0.5)
    assert forecast(ask(goes(0.8), None), [slow], MPS).slowdowns == pytest.approx((2.5, 2.5))
    nearly = holder(goes(0.8), None, rate=0.9)  # within what predictions are off anyway
    assert forecast(ask(goes(0.8), None), [nearly], MPS).slowdowns == pytest.approx((1.25, 1.25))


# -- the model ------------------------------------------------------------------------------------------------------
def test_an_unknown_demand_is_predicted_to_cost_more_than_a_light_one_and_less_than_a_heavy_one() -> None:
    light, unknown, heavy = (forecast(ask(demand), [holder(LIGHT)], MPS) for demand in (LIGHT, None, HEAVY))
    assert light.worst < unknown.worst < heavy.worst
    assert light.gain > unknown.gain
    assert bound(1.25).refusal(ask(LIGHT), [holder(LIGHT)]) is None
    assert bound(1.25).refusal(ask(HEAVY), [holder(None, mib=13_000)]) is not None


def test_time_slices_lose_where_mps_does_not() -> None:
    full = Demand(0.9, 0.4, 0.3, 1.0, 0.5)
    sliced = forecast(ask(full, None), [holder(full, None)], Terms(9.0, "timeslice"))
    assert sliced.gain == pytest.approx(0.875 - 1.0)
    assert "less would be done" in sentence(bound(9.0, "timeslice"), ask(full, None), holder(full, None))
    assert bound(9.0, "mps").refusal(ask(full, None), [holder(full, None)]) is None


# -- rank -----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("by_hand")
def test_the_gpu_on_which_it_adds_most_is_first_and_the_index_decides_a_tie() -> None:
    views = [
        GpuView(gpu=gpu(0), holders=(holder(goes(0.6)),)),
        GpuView(gpu=gpu(1), holders=(holder(goes(0.9)),)),
        GpuView(gpu=gpu(2), holders=(holder(goes(0.9)),)),
        GpuView(gpu=gpu(3)),
    ]
    ranked = bound().rank(ask(goes(0.8)), views, GpuId("GPU-0"))
    assert [entry.gpu for entry in ranked] == ["GPU-3", "GPU-1", "GPU-2", "GPU-0"]
    assert [part.name for part in ranked[-1].parts] == ["added_progress", "own_slowdown", "largest_slowdown"]
    assert [part.value for part in ranked[-1].parts] == pytest.approx([0.4, 1.25, 1.5])


def test_a_cached_answer_equals_a_new_one() -> None:
    policy, terms = bound(), Terms(1.25, "mps")
    neighbours = (holder(LIGHT), holder(Demand(0.4, 0.2, 0.2), 300.0, ran_s=50.0, done_s=40.0))
    asks = [ask(demand, alone_s) for demand in (LIGHT, HEAVY, None) for alone_s in (50.0, 900.0, None)]
    later = [Ask(TaskId(9), 1, 1_000, "declared", False, LIGHT, 50.0, NOW + 200.0)]
    for one in (*asks, *later, *asks):
        found = forecast(one, neighbours, terms)
        (ranked,) = policy.rank(one, [GpuView(gpu=gpu(0), holders=neighbours)], None)
        assert [part.value for part in ranked.parts] == pytest.approx(_parts(found), abs=1e-3)
        assert (policy.refusal(one, neighbours) is None) == (found.worst <= 1.25 and found.gain >= MIN_GAIN)


def _parts(found: Forecast) -> list[float]:
    return [found.gain, found.own, found.worst]


# -- who goes first -------------------------------------------------------------------------------------------------
def test_those_who_would_outlast_all_others_go_first_the_longest_first() -> None:
    urgent = bound().urgent
    assert urgent is not None
    short = [Waits(1, 100.0)] * 10
    # 10,000 s of work on two GPUs, each of which does 1.3: all is done after 3,846 s.
    assert urgent([*short, Waits(1, 4_000.0), Waits(1, 5_000.0)], 0.0, 2) == [11, 10]
    assert urgent([*short, Waits(1, 4_000.0), Waits(1, 5_000.0)], 100_000.0, 2) == [], "much runs before they are late"


def test_whose_run_time_is_not_known_is_never_urgent_and_counts_as_the_others_do() -> None:
    urgent = bound().urgent
    assert urgent is not None
    assert urgent([Waits(1, None)] * 3, 0.0, 1) == []
    assert urgent([Waits(1, None), Waits(1, 1_000.0)], 0.0, 1) == []  # 2,000 s of work: done after 1,538 s
    assert urgent([Waits(1, None), Waits(1, 1_000.0)], 0.0, 2) == [1]


def test_a_task_of_several_gpus_is_work_for_each_of_them() -> None:
    urgent = bound().urgent
    assert urgent is not None
    assert urgent([Waits(1, 1_000.0), Waits(1, 500.0)], 0.0, 1) == [0]  # 1,154 s
    assert urgent([Waits(1, 1_000.0), Waits(2, 500.0)], 0.0, 1) == []  # 1,538 s


@pytest.mark.usefixtures("by_hand")
def test_the_time_already_spent_counts_for_a_task_that_does_not_end_first() -> None:
    """The slowdown of the second task is 1.31 at this rate; counted from now on it would be 0.71 only."""
    neighbours = (holder(goes(0.99), 10.0, task=1), holder(goes(0.7), 1_000.0, task=2, done_s=500.0, ran_s=600.0))
    assert bound().refusal(ask(goes(0.99), 5_000.0), neighbours) is not None
    assert bound(1.4).refusal(ask(goes(0.99), 5_000.0), neighbours) is None
