"""Observed steps correct predicted rates: of the command whose steps were counted, within limits, across restarts."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carma.core.model.events import TaskPaused
from carma.core.model.settings import Rules
from carma.core.model.values import Correction, Demand, Deviation, TaskId
from carma.core.policies import goodput
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.rate_correction import FASTER, MOST_BESIDE, SLOWER, corrected, observed, unobserved
from carma.core.scheduling.sharing_model import progress_rates
from carma.core.telemetry import usage
from carma.core.telemetry.step_rates import LEARNT_COMMANDS
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.store.codec import read_event, write
from carma.testing.builders import BOB
from tests.unit.core.goodput_world import LIGHT, MEDIUM, ask, holder
from tests.unit.core.pace_world import FULL, GPU0, HALF, track_of
from tests.unit.core.test_step_rates import Training

ALONE_S, TOGETHER_S = 40, 30
MODEL = progress_rates([HALF, FULL])[0]


def corrections_of(training: Training) -> list[Correction]:
    return list(training.world.state.corrections.values())


def meet(training: Training, factor: float, *, alone_s: int = ALONE_S, together_s: int = TOGETHER_S) -> TaskId:
    """A task of Alice, alone at ten steps per second, then beside one of Bob's at `factor` of the predicted rate."""
    training.world.activity[GPU0] = (HALF.sm_active, HALF.sm_occupancy, HALF.dram_active)
    task = training.begin(10.0, HALF, command="victim")
    training.train(alone_s)
    training.begin(0.0, FULL, command="neighbour", owner=BOB)
    training.per_s[task] = 10.0 * MODEL * factor
    training.train(together_s)
    return task


@pytest.mark.parametrize("factor", [0.85, 1.1])
def test_a_rate_that_was_measured_corrects_the_running_task_and_later_ones_of_its_command(factor: float) -> None:
    training = Training()
    task = meet(training, factor)
    rate = track_of(training.world, task).rate
    assert min(MODEL, factor * MODEL) < rate < max(MODEL, factor * MODEL)
    assert isclose(rate, factor * MODEL, rel_tol=0.06)
    later = training.begin(10.0, HALF, command="victim")
    other = training.begin(10.0, HALF, command="other")
    unknown = replace(training.world.task(later), estimate=None)
    assert ask_of(training.world.task(later), training.world.state).correction is not None
    assert ask_of(training.world.task(other), training.world.state).correction is None
    assert ask_of(unknown, training.world.state).correction is None


def test_steps_of_one_user_change_no_rate_of_another_user() -> None:
    training = Training()
    meet(training, 0.5)
    for one in corrections_of(training):
        if one.command.startswith(f"{BOB.uid}:"):
            assert one == unobserved(one.command)
        else:
            assert one.own.mean < 0.0
            assert [deviation.mean < 0.0 for _, deviation in one.beside] == [True]
    neighbour = track_of(training.world, TaskId(2))
    assert neighbour.rate == progress_rates([HALF, FULL])[1]


def test_nothing_is_learned_before_the_neighbours_have_settled_or_without_a_rate_alone() -> None:
    too_short, never_alone = Training(), Training()
    meet(too_short, 0.8, together_s=13)
    meet(never_alone, 0.8, alone_s=1)
    assert corrections_of(too_short) == corrections_of(never_alone) == []


def test_nothing_is_learned_beside_a_paused_neighbour() -> None:
    """It presses on nobody, so that the rates say nothing about it."""
    training = Training()
    task = meet(training, 1.0, together_s=13)  # it has settled
    training.world.emit(TaskPaused(training.world.now, TaskId(2), "bob"))
    training.per_s[task] = 8.0
    training.train(TOGETHER_S)
    assert corrections_of(training) == []


def test_nothing_is_learned_beside_a_task_of_which_nothing_is_known() -> None:
    training = Training()
    task = training.begin(10.0, HALF)
    training.train(ALONE_S)
    training.begin(0.0, None, owner=BOB)
    training.per_s[task] = 3.0
    training.train(TOGETHER_S)
    assert corrections_of(training) == []


def test_a_user_who_lies_about_steps_keeps_no_light_neighbour_away() -> None:
    training = Training()
    task = meet(training, 0.02, together_s=300)
    assert track_of(training.world, task).rate == pytest.approx(SLOWER * MODEL)
    slow = next(one for one in corrections_of(training) if one.own.mean < 0.0)
    policy = goodput.bound(Rules())
    assert policy.objection is not None
    liar = replace(holder(MEDIUM, None), correction=slow)
    assert policy.objection(ask(LIGHT, None), [liar]) is None


def test_what_was_learned_survives_a_restart() -> None:
    training = Training()
    task = meet(training, 0.8)
    state = training.world.state
    note = usage.note(state)
    assert {one.command for one in note.corrections} == set(state.corrections)
    training.world.emit(read_event(write(note)))
    assert usage.note(state).corrections == (), "stored once"
    again = restore(state.rules, state.policy, checkpoint(state, 1)[0])
    assert again.corrections == state.corrections
    assert track_of(training.world, task).rate == again.tracks[again.active[task]].rate
    replayed = Training().world
    replayed.emit(note)
    assert replayed.state.corrections == state.corrections


def test_a_later_observation_is_not_lost_to_the_note_of_an_earlier_one() -> None:
    training = Training()
    meet(training, 0.8)
    note = usage.note(training.world.state)
    training.train(4 * TOGETHER_S)
    learned = dict(training.world.state.corrections)
    assert learned != {one.command: one for one in note.corrections}
    training.world.emit(note)
    assert training.world.state.corrections == learned
    assert len(usage.note(training.world.state).corrections) >= 1


def test_the_commands_of_each_user_and_the_neighbours_of_each_command_are_limited_in_number() -> None:
    world = Training().world
    many = tuple(unobserved(f"{uid}:{place}") for place in range(LEARNT_COMMANDS + 3) for uid in (1, 12))
    world.emit(replace(usage.note(world.state), corrections=(unobserved("2:0"), *many)))
    assert len(world.state.corrections) == 2 * LEARNT_COMMANDS + 1
    assert "2:0" in world.state.corrections
    one = unobserved("1:0")
    for place in range(MOST_BESIDE + 2):
        one = observed(one, [str(place)], 0.8, 0.7)
    assert [name for name, _ in one.beside] == [str(place) for place in range(2, MOST_BESIDE + 2)]


def test_the_more_is_known_the_less_caution() -> None:
    demands, one, other = [MEDIUM, MEDIUM], unobserved("1:a"), unobserved("2:b")
    cautious = [progress_rates(demands, cautious=True)[0]]
    rate = progress_rates(demands)[0]
    for _ in range(3):
        one = observed(one, ["2:b"], rate, rate)
        cautious.append(progress_rates(demands, cautious=True, corrections=[one, other])[0])
    assert cautious == sorted(set(cautious))
    assert cautious[-1] < rate
    assert progress_rates(demands, corrections=[one, other])[0] == rate


shares = st.floats(0.0, 1.0)
demands_of_groups = st.lists(st.builds(Demand, shares, shares, shares, shares, shares), min_size=1, max_size=5)
deviations = st.builds(Deviation, st.floats(-5.0, 5.0), st.floats(0.0, 0.3))


@given(demands_of_groups, st.data())
def test_corrected_rates_stay_near_the_model_and_a_neighbour_never_makes_a_task_faster(
    demands: list[Demand], data: st.DataObject
) -> None:
    known = [Correction(f"1:{place}", data.draw(deviations)) for place in range(len(demands))]
    model, rates = progress_rates(demands), progress_rates(demands, corrections=known)
    for one, rate in zip(model, rates, strict=True):
        assert SLOWER * one - 1e-9 <= rate <= min(1.0, FASTER * one) + 1e-9
    if len(demands) == 1:
        assert rates == (1.0,)
    else:
        fewer = progress_rates(demands[:-1], corrections=known[:-1])
        assert all(rate <= before + 1e-9 for rate, before in zip(rates, fewer, strict=False))


def test_a_deviation_beside_a_command_counts_for_each_copy_of_it() -> None:
    beside = (("1:b", Deviation(1.0, 0.1)),)
    one, other = Correction("1:a", Deviation(0.0, 0.1), beside), unobserved("1:b")
    alone, copies, stranger = ([one, *others] for others in ([other], [other, other], [other, None]))
    rates = [corrected([0.5] * len(known), known)[0] for known in (alone, copies, stranger)]
    assert rates[1] > rates[0] > rates[2] > 0.5
    assert corrected([0.5, 0.5], [one, None]) == (0.5, 0.5)
