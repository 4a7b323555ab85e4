"""What a task would keep busy alone, how far it is and how fast it goes: from samples, by hand where it can be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.attempt_end import ended
from carma.core.model.decision import Ask
from carma.core.model.outcome import Failed
from carma.core.model.settings import Sharing
from carma.core.model.values import Alone, AttemptKey, Demand
from carma.core.policies import first_fit, goodput
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.sharing_model import mechanism_of, progress_rates
from carma.core.telemetry.measurements import FADES_S
from carma.core.telemetry.observation import UNUSED_S
from carma.core.telemetry.pace import BELIEVED_S, CALM_S, MOST_S, NO_DEMAND, alone_of, belief, follow, regroup
from carma.core.telemetry.usage import note
from carma.daemon.state_checkpoint import adopt, checkpoint, restore
from carma.testing.builders import World
from tests.unit.core.pace_world import (
    FULL,
    GPU0,
    GPU1,
    HALF,
    OPEN,
    begin,
    believed,
    members,
    seen_of,
    shows,
    track_of,
    world,
)


# -- demand ---------------------------------------------------------------------------------------------------------
def test_alone_it_shows_its_demand_itself_once_it_was_calm_and_seen_for_long_enough() -> None:
    made = world()
    task = begin(made)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    made.wait(CALM_S + BELIEVED_S - 2.0)
    assert believed(made, task) is None, "no estimate exists, and too few samples"
    made.wait(5.0)
    found = believed(made, task)
    assert found is not None
    assert (found.sm_active, found.sm_occupancy, found.dram_active) == pytest.approx((0.6, 0.3, 0.2))


def test_while_its_memory_grows_it_is_starting_up() -> None:
    made = world()
    task = begin(made)
    key = made.state.active[task]
    for mib in range(1_000, 9_000, 200):
        made.memory[key] = mib
        made.wait(1.0)
    assert believed(made, task) is None


def test_an_estimated_demand_has_precedence_over_a_slightly_different_observation() -> None:
    made = world()
    task = begin(made, HALF)
    for active in (0.7, 0.35):
        made.activity[GPU0] = (active, active / 2, active / 2)
        made.wait(90.0)
        assert believed(made, task) == HALF


@pytest.mark.parametrize("active", [0.9, 0.02])
def test_a_clearly_different_demand_observed_alone_replaces_the_estimate(active: float) -> None:
    made = world()
    task = begin(made, HALF)
    made.activity[GPU0] = (active, active / 2, active / 2)
    made.wait(90.0)
    found = believed(made, task)
    assert found is not None
    assert found.sm_active == pytest.approx(active, abs=0.02)


def test_a_gpu_that_a_task_on_several_gpus_leaves_idle_has_no_demand() -> None:
    made = world(2)
    task = begin(made, FULL, gpus=2)
    made.activity[GPU0], made.activity[GPU1] = (0.9, 0.4, 0.4), (0.02, 0.01, 0.01)
    made.wait(60.0)
    assert belief(made.task(task), seen_of(made, task, GPU0)) == FULL
    idle = belief(made.task(task), seen_of(made, task, GPU1))
    assert idle == NO_DEMAND
    assert progress_rates([idle, FULL]) == (1.0, 1.0), "a task without demand and another task do not slow each other"


@pytest.mark.parametrize(("part", "believed_idle"), [(0.24, True), (0.26, False)])
def test_beside_neighbours_a_task_on_several_gpus_leaves_a_gpu_idle_below_a_quarter_of_its_demand(
    part: float, believed_idle: bool
) -> None:
    made = world(2)
    task = begin(made, FULL, gpus=2)
    seen = seen_of(made, task, GPU1)
    seen.solo.seconds, seen.solo.sm_active = BELIEVED_S, part * FULL.sm_active
    assert (belief(made.task(task), seen) == seen.solo.demand) is believed_idle
    assert (belief(made.task(task), seen) == FULL) is not believed_idle


def test_a_task_slowed_down_on_another_gpu_does_not_count_as_idle() -> None:
    """It goes at the pace of the slower one: alone on the other it shows less than it would need."""
    made = world(2)
    neighbour = begin(made, FULL)
    made.wait(1)
    wide = begin(made, FULL, gpus=2)
    assert set(track_of(made, wide).on) == {GPU0, GPU1}
    assert set(track_of(made, neighbour).on) == {GPU0}
    slowed = progress_rates([FULL, FULL])[1]
    made.activity[GPU1] = (FULL.sm_active * slowed, FULL.sm_occupancy * slowed, FULL.dram_active * slowed)
    made.wait(CALM_S + 3 * BELIEVED_S)
    found = belief(made.task(wide), seen_of(made, wide, GPU1))
    assert found is not None
    assert found.sm_active == pytest.approx(FULL.sm_active, abs=0.01)


def test_beside_others_what_is_seen_of_it_is_divided_by_its_rate() -> None:
    made = world()
    known, new = begin(made, FULL), begin(made)
    made.wait(CALM_S + 1.0)
    own = seen_of(made, new).solo
    own.__init__()  # type: ignore[misc]  # nothing was seen of it
    rate = track_of(made, new).rates[GPU0]
    assert rate == pytest.approx(progress_rates([FULL, None])[1])
    for place in range(2):  # not long enough to be believed: that would change the rate
        follow(made.state, made.state.live_of(GPU0), members(made, known, new), (0.75, 0.25), False,
               shows(made.now + 5.0 * place, 0.8), 5.0)  # fmt: skip
    assert own.sm_active == pytest.approx(0.8 * 0.25 / rate)
    assert own.seconds == 10.0
    assert own.alone_s == 0.0
    assert own.gr_active is None, "what the engine does beside others says nothing of one"


def test_an_observed_demand_is_at_most_a_whole_gpu() -> None:
    made = world()
    one, two = begin(made), begin(made)
    made.wait(CALM_S + 1.0)
    follow(made.state, made.state.live_of(GPU0), members(made, one, two), (0.9, 0.1), False, shows(made.now, 1.0), 5.0)
    assert seen_of(made, one).solo.sm_active <= 1.0


def test_what_it_shows_alone_replaces_what_was_made_of_it_beside_others() -> None:
    made = world()
    one, two = begin(made), begin(made)
    made.activity[GPU0] = (0.9, 0.4, 0.4)
    made.wait(60.0)
    before = seen_of(made, one).solo.sm_active
    made.end(two)
    made.activity[GPU0] = (0.2, 0.1, 0.1)
    made.wait(2.0)
    assert before > 0.4
    assert seen_of(made, one).solo.sm_active == pytest.approx(0.2)


def test_one_sample_after_a_long_gap_is_not_enough_for_a_demand() -> None:
    made = world()
    task = begin(made)
    made.wait(CALM_S + 1.0)
    seen_of(made, task).solo.__init__()  # type: ignore[misc]
    follow(made.state, made.state.live_of(GPU0), members(made, task), (1.0,), False, shows(made.now, 0.7), 600.0)
    assert seen_of(made, task).solo.seconds == MOST_S


def test_a_foreign_process_counts_as_a_neighbour() -> None:
    made = world()
    task = begin(made)
    made.foreign[GPU0] = 3_000
    made.activity[GPU0] = (0.9, 0.4, 0.4)
    made.wait(60.0)
    assert seen_of(made, task).solo.alone_s == 0.0


def test_a_gpu_that_gives_no_activity_tells_nothing() -> None:
    made = world()
    task = begin(made)
    made.activity[GPU0] = (None, None, None)
    made.wait(60.0)
    assert believed(made, task) is None


def test_an_earlier_attempt_tells_of_the_next() -> None:
    made = world()
    task = begin(made)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    made.wait(60.0)
    key = made.state.active[task]
    event = ended(made.state, key, Failed(3), made.now)
    assert event.alone is not None
    made.emit(event)
    found = belief(made.task(task), None)
    assert found is not None
    assert found.sm_active == pytest.approx(0.6)


# -- progress -------------------------------------------------------------------------------------------------------
def test_progress_is_time_alone_and_time_beside_others_at_their_rate() -> None:
    made = world()
    first = begin(made, HALF)
    made.now += 100.0
    made.sample()
    second = begin(made, FULL)
    rate, other = progress_rates([HALF, FULL])
    assert 0.0 < rate < 1.0
    assert track_of(made, first).done_by(made.now) == pytest.approx(100.0)
    made.now += 200.0
    assert track_of(made, first).done_by(made.now) == pytest.approx(100.0 + 200.0 * rate)
    assert track_of(made, second).done_by(made.now) == pytest.approx(200.0 * other)
    made.end(second)
    made.now += 50.0
    assert track_of(made, first).rate == 1.0
    assert track_of(made, first).done_by(made.now) == pytest.approx(150.0 + 200.0 * rate)


def test_a_neighbour_that_has_not_used_the_gpu_slows_nothing_down_until_it_does() -> None:
    made = world()
    first = begin(made, HALF)
    idle = made.submit(1_000)
    made.settle()
    made.start(idle, mib=0)
    key = made.state.active[idle]
    del made.memory[key]
    assert track_of(made, first).rate == progress_rates([HALF, None])[0] < 1.0, "it may have begun meanwhile"
    made.wait(UNUSED_S + 1.0)
    assert track_of(made, first).rate == 1.0
    made.memory[key] = 1_000
    made.wait(1.0)
    assert track_of(made, first).rate == progress_rates([believed(made, first), None])[0] < 1.0


def test_without_a_list_of_processes_a_neighbour_counts_from_its_start() -> None:
    made = world()
    made.no_processes.add(GPU0)
    made.wait(1.0)
    first, _ = begin(made, HALF), begin(made, FULL)
    assert track_of(made, first).rate == progress_rates([HALF, FULL])[0] < 1.0


def test_time_slices_have_rates_of_their_own() -> None:
    made = world(rules=replace(OPEN, sharing=Sharing(mechanism="timeslice")))
    first, _ = begin(made, FULL), begin(made, FULL)
    assert track_of(made, first).rate == pytest.approx(progress_rates([FULL, FULL], "timeslice")[0])


def test_of_several_gpus_the_slowest_counts() -> None:
    made = world(2)
    wide = begin(made, HALF, gpus=2)
    begin(made, FULL)
    made.now += 10.0
    track = track_of(made, wide)
    assert track.rates[GPU1] == 1.0
    assert track.rate == track.rates[GPU0] == pytest.approx(progress_rates([HALF, FULL])[0])


def test_more_that_is_known_of_a_neighbour_changes_the_rate_from_then_on() -> None:
    made = world()
    first, second = begin(made, HALF), begin(made)  # of the second nothing is known: it counts as a demanding one
    cautious = track_of(made, first).rate
    made.activity[GPU0] = (0.45, 0.2, 0.2)
    made.wait(CALM_S + 2 * BELIEVED_S)
    known = believed(made, second)
    assert known is not None
    assert track_of(made, first).rate == pytest.approx(progress_rates([HALF, known])[0], abs=0.02)
    assert track_of(made, first).rate > cautious
    assert track_of(made, first).done_s > 0.0, "what was done until then is added up"


# -- on record ------------------------------------------------------------------------------------------------------
def test_what_is_put_on_record_is_its_demand_and_its_pace() -> None:
    made = world()
    one = begin(made)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    made.wait(60.0)
    track = track_of(made, one)
    found = alone_of(track, made.now)
    assert found == Alone(demand=Demand(0.6, 0.3, 0.2), pace=1.0)
    track.begin(made.now - 100.0, 40.0)
    track.paced_at = made.now
    slowed = alone_of(track, made.now)
    assert slowed is not None
    assert slowed.pace == pytest.approx(0.4)


def test_a_short_observation_is_not_stored() -> None:
    made = world()
    one = begin(made)
    made.wait(CALM_S + 3.0)
    assert alone_of(track_of(made, one), made.now) is None


def test_after_a_restart_it_goes_on_from_where_it_was() -> None:
    made = world()
    one = begin(made)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    made.wait(60.0)
    made.emit(note(made.state))
    saved, _ = checkpoint(made.state, len(made.log))
    again = restore(OPEN, first_fit.POLICY, saved)
    adopt(again)
    key = again.active[one]
    track = again.tracks[key]
    assert belief(again.tasks[one], track.on[GPU0]) == Demand(0.6, 0.3, 0.2)
    assert track.on[GPU0].solo.seconds == FADES_S
    started = again.tasks[one].attempts[-1].started_at
    assert track.began_at == started
    assert track.done_by(again.now) == pytest.approx(again.now - (started or 0.0), abs=1.0)


def test_after_a_restart_neighbours_have_their_rates_and_a_slow_one_its_pace() -> None:
    made = world()
    one, _ = begin(made, HALF), begin(made, FULL)
    made.activity[GPU0] = (0.9, 0.4, 0.4)
    made.wait(60.0)
    rate = track_of(made, one).rate
    made.emit(note(made.state))
    done_s = track_of(made, one).done_by(made.now)
    saved, _ = checkpoint(made.state, len(made.log))
    again = restore(OPEN, first_fit.POLICY, saved)
    track = again.tracks[AttemptKey(one, 1)]
    assert track.rate == pytest.approx(rate)
    assert track.done_by(again.now) == pytest.approx(done_s, rel=0.1)


def test_regrouping_twice_at_the_same_moment_changes_nothing() -> None:
    made = world()
    one, _ = begin(made, HALF), begin(made, FULL)
    made.now += 30.0
    regroup(made.state, (GPU0,), made.now)
    once = (track_of(made, one).done_s, track_of(made, one).rate)
    regroup(made.state, (GPU0,), made.now)
    assert (track_of(made, one).done_s, track_of(made, one).rate) == once


# -- what decisions get of it ---------------------------------------------------------------------------------------
def test_an_ask_and_a_holder_carry_what_is_known() -> None:
    made = World(1, rules=OPEN, policy=goodput.POLICY)
    one = begin(made, HALF, 500.0)
    made.now += 100.0
    made.sample()
    asked: Ask = ask_of(made.task(one), made.state)
    assert (asked.demand, asked.alone_s) == (HALF, 500.0)
    (held,) = made.view(0).holders
    assert held.demand == HALF
    assert held.progress is not None
    assert held.progress.alone_s == 500.0
    assert held.progress.done_by(made.now) == pytest.approx(100.0)


def test_the_mechanism_is_mps_unless_the_server_takes_turns() -> None:
    assert [mechanism_of(replace(OPEN, sharing=Sharing(mechanism=how))) for how in ("auto", "mps", "mig")] == (
        ["mps"] * 3
    )
    assert mechanism_of(replace(OPEN, sharing=Sharing(mechanism="timeslice"))) == "timeslice"
