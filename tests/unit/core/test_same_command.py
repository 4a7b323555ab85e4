"""A task of unknown demand, and what was observed of another task with the same command."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.values import Demand
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.sharing_model import by_size, demanding, progress_rates, shown
from carma.core.state import State
from carma.core.telemetry.pace import BELIEVED_S, CALM_S, MOST_COMMANDS, command_of, observed_of_command
from carma.testing.builders import World
from tests.unit.core.goodput_world import MEDIUM, ask, bound, holder, sentence
from tests.unit.core.pace_world import GPU0, HALF, begin, believed, seen_of, track_of, world

LEARNT_S = CALM_S + BELIEVED_S + 5.0


def observed_alone() -> World:
    made = world(2)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    begin(made)
    made.wait(LEARNT_S)
    return made


def expected_of(state: State, **differs: object) -> Demand | None:
    """Of a waiting task that is like task 1 except for that."""
    first = next(iter(state.tasks.values()))
    spec = replace(first.spec, **{name: value for name, value in differs.items() if name in ("command", "gpus")})
    owner = replace(first.owner, uid=differs.get("uid", first.owner.uid))
    fingerprint = str(differs.get("fingerprint", ""))
    return ask_of(replace(first, spec=spec, owner=owner, fingerprint=fingerprint, attempts=()), state).same_command


def test_a_task_is_expected_to_need_what_was_observed_of_its_command() -> None:
    made = observed_alone()
    found = expected_of(made.state)
    assert found is not None
    assert found.sm_active == pytest.approx(0.6)
    made.end(next(iter(made.state.tasks)))
    assert expected_of(made.state) == found, "it is remembered after the end of the observed task"


@pytest.mark.parametrize("differs", [{"command": ("y",)}, {"uid": 4_711}, {"fingerprint": "changed"}, {"gpus": 2}])
def test_another_command_user_program_or_number_of_gpus_is_not_the_same(differs: dict[str, object]) -> None:
    assert expected_of(observed_alone().state, **differs) is None


def test_a_running_task_of_that_command_is_judged_by_the_observation_at_once() -> None:
    made = world(2)
    made.activity[GPU0] = (0.6, 0.3, 0.2)
    first = begin(made)
    made.wait(LEARNT_S - 10.0)
    second = begin(made)
    other = made.gpus_of(second)[0]
    assert [one.same_command for one in made.view(other).holders if one.key.task == second] == [None]
    made.wait(10.0)
    found = next(one for one in made.view(other).holders if one.key.task == second)
    assert (found.demand, found.same_command) == (None, believed(made, first))


def test_tasks_of_one_command_on_a_gpu_are_known_together_and_without_the_caution_for_unknown_tasks() -> None:
    made = world()
    tasks = [begin(made), begin(made)]
    true = Demand(0.2, 0.1, 0.2)
    seen = shown((true, true), progress_rates((true, true)))
    made.activity[GPU0] = (seen.sm_active, seen.sm_occupancy, seen.dram_active)
    made.wait(LEARNT_S)
    for task in tasks:
        found = believed(made, task)
        assert found is not None
        assert (found.sm_active, found.sm_occupancy, found.dram_active) == pytest.approx((0.2, 0.1, 0.2), rel=0.03)


def test_more_tasks_of_that_command_on_the_gpu_do_not_make_it_look_demanding() -> None:
    """Four light tasks show as much as four heavy ones that take turns: what is known of the command decides."""
    made = world()
    true = Demand(0.2, 0.1, 0.2)
    for together in (2, 4):
        while len(made.state.active) < together:
            begin(made)
        seen = shown((true,) * together, progress_rates((true,) * together))
        made.activity[GPU0] = (seen.sm_active, seen.sm_occupancy, seen.dram_active)
        made.wait(LEARNT_S)
    assert [seen_of(made, task).solo.sm_active for task in made.state.active] == [pytest.approx(0.2, rel=0.1)] * 4


def test_what_was_observed_beside_another_command_is_not_passed_on() -> None:
    made = world()
    begin(made, HALF)
    other = begin(made)
    task = made.task(other)
    made.state.tasks[other] = replace(task, spec=replace(task.spec, command=("y",)))
    made.activity[GPU0] = (0.9, 0.4, 0.3)
    made.wait(LEARNT_S)
    assert believed(made, other) is not None
    assert made.state.commands == {}


def test_the_progress_of_tasks_of_one_command_counts_by_what_is_known_of_it() -> None:
    made = observed_alone()
    made.end(next(iter(made.state.tasks)))
    known = next(iter(made.state.commands.values()))
    made.state.drained["GPU-1"] = ""
    first, _ = begin(made), begin(made)
    assert track_of(made, first).rate == progress_rates((known, known))[0] > progress_rates((None, None))[0]


def test_a_known_task_of_that_command_is_not_changed_by_its_neighbours() -> None:
    made = world()
    known, _ = begin(made, HALF), begin(made)
    made.activity[GPU0] = (0.9, 0.4, 0.3)
    made.wait(LEARNT_S)
    assert believed(made, known) == HALF


def test_only_the_newest_commands_are_remembered() -> None:
    made = observed_alone()
    first = next(iter(made.state.tasks.values()))
    demand = made.state.commands.pop(command_of(first))
    for number in range(MOST_COMMANDS):
        made.state.commands[f"0:{number}"] = demand
    made.activity[GPU0] = (0.3, 0.1, 0.1)
    made.end(first.id)
    begin(made)
    made.wait(LEARNT_S)
    assert len(made.state.commands) == MOST_COMMANDS
    assert "0:0" not in made.state.commands
    assert observed_of_command(made.state, first) is not None


def test_the_cap_applies_to_the_observed_demand_and_the_limit_to_a_demanding_one() -> None:
    """A demanding one draws more power; it is not the most demanding of its memory size."""
    like = replace(ask(None, None), memory_mib=16_000, same_command=MEDIUM)
    neighbour = replace(holder(MEDIUM), progress=None)
    expected, bad_case = (1.0 / min(progress_rates((MEDIUM, one))) for one in (MEDIUM, demanding(MEDIUM)))
    assert expected < bad_case < 1.0 / min(progress_rates((MEDIUM, by_size(16_000))))
    assert bound(expected + 0.001, limit=bad_case + 0.001).refusal(like, [neighbour]) is None
    told = sentence(bound(expected + 0.001, limit=bad_case - 0.001), like, neighbour)
    assert f"{bad_case:.2f} times" in told
    assert "most demanding tenth of tasks with the same command" in told
    told = sentence(bound(expected - 0.001), like, neighbour)
    assert f"{expected:.2f} times" in told
    assert "it counts as a typical task with the same command" in told
