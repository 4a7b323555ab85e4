"""Simulated tasks that save: on a signal, at a cost, or by themselves now and then; and go on from there."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from carma.core.machine import step
from carma.core.model import events as e
from carma.core.model.settings import Preemption, RecoveryRules, Rules
from carma.core.policies import exclusive, magm
from carma.core.state import State
from carma.traces import TraceTask
from carma_lab.runs.figures import TaskRun
from carma_lab.simulator.simulation import Simulation
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import OPEN, row

ON = replace(OPEN, preemption=Preemption(enabled=True, after_s=60.0, least_run_s=100.0))


def made(*rows: TraceTask, rules: Rules = ON) -> Simulation:
    return sim_made.simulation(*rows, rules=rules, policy=exclusive.POLICY)


def low(**changes: object) -> TraceTask:
    return row(0.0, name="low", priority=-1, seconds=1_000.0, **changes)


HIGH = row(400.0, name="high", seconds=300.0)


def runs(simulation: Simulation) -> dict[str, TaskRun]:
    assert simulation.run().failed == 0
    return {run.name: run for run in simulation.runs}


def test_one_that_saves_on_a_signal_loses_nothing_but_the_time_of_the_save() -> None:
    simulation = made(low(save_s=30.0), HIGH)
    found = runs(simulation)
    first, second = found["low"].attempts
    (between,) = found["high"].attempts
    asked_at = 400.0 + 60.0
    assert (first.outcome, second.outcome) == ("preempted", "succeeded")
    assert first.ended_at == pytest.approx(asked_at + 30.0, abs=5.0)  # asked at the next pass
    assert between.placed_at == pytest.approx(first.ended_at)
    assert between.ended_at - between.placed_at == pytest.approx(300.0)
    assert second.placed_at == pytest.approx(between.ended_at)
    assert found["low"].ran_s == pytest.approx(1_000.0 + 30.0), "all of its work once, and the save"
    assert found["low"].slowdown == pytest.approx(1.03)
    figures = simulation.figures(0.0)
    assert (figures.preemptions, figures.wasted_gpu_s) == (1, 0.0)


def test_while_it_saves_it_holds_its_memory_and_keeps_the_gpu_idle() -> None:
    simulation = made(low(save_s=50.0), HIGH)
    shown: list[tuple[int | None, float | None]] = []
    asked_at: float | None = None
    for event in simulation.events():
        if isinstance(event, e.PreemptionRequested):
            asked_at = event.at
        if isinstance(event, e.AttemptEnded):
            break
        if isinstance(event, e.GpusSampled) and asked_at is not None and event.at > asked_at + 5.0:
            shown.append((event.samples[0].memory_used_mib, event.samples[0].activity.sm_active))
    assert shown
    assert set(shown) == {(4_000, 0.0)}


def test_one_that_only_writes_checkpoints_goes_on_from_the_last() -> None:
    simulation = made(low(checkpoint_s=150.0), HIGH)
    low_run = runs(simulation)["low"]
    first, second = low_run.attempts
    ran_s = first.ended_at - first.placed_at
    assert 450.0 < ran_s < 600.0
    assert second.ended_at - second.placed_at == pytest.approx(1_000.0 - 450.0)


@pytest.mark.parametrize(("saves", "rules"), [({}, ON), ({"save_s": 30.0}, OPEN)], ids=["it cannot", "it is off"])
def test_no_other_task_is_asked_to_save(saves: dict[str, float], rules: Rules) -> None:
    simulation = made(low(**saves), HIGH, rules=rules)
    low_run = runs(simulation)["low"]
    assert [one.outcome for one in low_run.attempts] == ["succeeded"]
    assert simulation.figures(0.0).preemptions == 0


def test_what_was_saved_is_there_after_an_out_of_memory_too() -> None:
    """Two tasks grow on one GPU until it is full: the one that runs out goes on from its checkpoint."""
    rules = replace(OPEN, recovery=RecoveryRules(backoff_s=0.0))
    big = {"memory_mib": 25_000, "seconds": 1_000.0, "ramp_s": 400.0}
    plain = sim_made.simulation(row(0.0, **big), row(1.0, **big), rules=rules, memory="none", policy=magm.POLICY)
    saving = sim_made.simulation(
        *(row(at, checkpoint_s=50.0, **big) for at in (0.0, 1.0)), rules=rules, memory="none", policy=magm.POLICY
    )
    for simulation, again_s in ((plain, 1_000.0), (saving, 950.0)):
        simulation.run()
        (victim,) = (run for run in simulation.runs if len(run.attempts) > 1)
        assert victim.attempts[0].outcome == "out_of_memory"
        last = victim.attempts[-1]
        assert last.outcome == "succeeded"
        assert (last.used_s or 0.0) <= again_s + 300.0  # beside the other it goes slower
    assert saving.figures(0.0).makespan_s < plain.figures(0.0).makespan_s


def test_asked_before_it_has_come_to_its_gpu_it_leaves_at_once() -> None:
    rules = replace(ON, preemption=replace(ON.preemption, after_s=10.0, least_run_s=0.0))
    simulation = made(low(save_s=30.0, start_s=500.0), row(100.0, name="high", seconds=300.0), rules=rules)
    first, _ = runs(simulation)["low"].attempts
    assert first.outcome == "preempted"
    assert first.used_s == 0.0
    assert runs_again(simulation) == pytest.approx(1_000.0)


def runs_again(simulation: Simulation) -> float:
    (low_run,) = (run for run in simulation.runs if run.name == "low")
    return low_run.attempts[-1].ended_at - low_run.attempts[-1].placed_at


def test_the_same_again_gives_the_same_bytes_and_the_log_replays() -> None:
    rows = (low(save_s=30.0), HIGH, row(500.0, name="late", priority=3, seconds=50.0))
    logs = [[msgspec.json.encode(event) for event in made(*rows).events()] for _ in range(2)]
    assert logs[0] == logs[1]
    state = State(ON, exclusive.POLICY)
    for event in made(*rows).events():
        step(state, event)
    assert not state.active
    assert not state.preempting
