"""Whole runs: the same bytes for the same seed, the published anchors, every policy to its end."""

from __future__ import annotations

from statistics import fmean, pstdev

import msgspec
import pytest

from carma.core.machine import step
from carma.core.model import events as e
from carma.core.model.settings import Rules
from carma.core.model.values import AttemptKey
from carma.core.policies import exclusive, magm
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.sharing_model import engine_share
from carma.core.state import State
from carma.errors import CarmaError, Usage
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.sampling import COUNTS_S, STEP_ERROR, STEPS_PER_S
from carma_lab.simulator.simulation import Simulation
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import row


@pytest.mark.parametrize("policy", ["exclusive", "round-robin", "first-fit", "best-fit", "magm", "lug"])
def test_every_task_comes_to_its_end(policy: str) -> None:
    made = simulation(Request(trace="t1", policy=policy))
    figures = made.run()
    assert (figures.tasks, figures.failed) == (60, 0)
    assert not made.state.tasks
    assert not made.state.active
    assert not made.state.queue
    assert all(not board.runners and board.used_mib == 0 for board in made.world.boards)


def test_exclusive_gpus_in_turn_are_what_was_worked_out_from_the_published_trace() -> None:
    """Strict FIFO on four GPUs: 7.70 h, mean wait 123 min, mean completion 149 min."""
    figures = simulation(Request(trace="t1", policy="exclusive", demand="none")).run()
    assert figures.makespan_s / 3600 == pytest.approx(7.70, rel=0.01)
    assert figures.wait_mean_s / 60 == pytest.approx(123, rel=0.02)
    assert figures.completion_mean_s / 60 == pytest.approx(149, rel=0.02)


@pytest.mark.parametrize("given", [0.7, None])
def test_samples_show_the_share_of_time_with_any_kernel_as_the_sharing_model_takes_it(given: float | None) -> None:
    task = row(seconds=300.0, ramp_s=0.0, gr_active=given)
    made = sim_made.simulation(task, row(200.0), gpus=1, policy=magm.POLICY)
    samples = [sample for event in made.events() if isinstance(event, e.GpusSampled) for sample in event.samples]
    alone = [sample.activity.gr_active for sample in samples if 20.0 < sample.at <= 200.0]
    assert alone
    assert alone == pytest.approx([engine_share(task.demand)] * len(alone))


def log_of(request: Request) -> bytes:
    return b"\n".join(msgspec.json.encode(event) for event in simulation(request).events())


def test_the_same_seed_gives_the_same_bytes() -> None:
    request = Request(trace="t1", policy="magm", memory="none", noise=0.1, seed=3)
    assert log_of(request) == log_of(request)
    assert log_of(request) != log_of(msgspec.structs.replace(request, seed=4))


def test_a_replay_of_the_cores_events_gives_the_same_decisions() -> None:
    """A log is enough: stepped into an empty state, it is accepted event by event."""
    state = State(Rules(), magm.POLICY)
    placed = 0
    for event in simulation(Request(trace="t1", policy="magm")).events():
        step(state, event)
        placed += isinstance(event, e.TaskPlaced)
    assert placed >= 60
    assert not state.active


def test_counted_steps_show_the_true_rates_with_an_error() -> None:
    made = simulation(Request(trace="t1", policy="magm", noise=1.0))
    before: dict[AttemptKey, tuple[float, int]] = {}
    ratios: list[float] = []
    for event in made.events():
        for one in event.counts if isinstance(event, e.StepsCounted) else ():
            at, steps = before.get(one.key, (0.0, 0))
            runner = made._runners[one.key]
            if event.at - at == COUNTS_S[1] and runner.since < at and not runner.still:
                ratios.append((one.steps - steps) / (event.at - at) / STEPS_PER_S / runner.rate)
            before[one.key] = event.at, one.steps
    assert len(ratios) > 60
    assert fmean(ratios) == pytest.approx(1.0, abs=0.02)
    assert 0.5 * STEP_ERROR < pstdev(ratios) < 1.5 * STEP_ERROR


def test_without_counted_steps_nothing_is_learned() -> None:
    made = simulation(Request(trace="t1", policy="magm", noise=1.0))
    blind = Simulation(made.trace, msgspec.structs.replace(made.setup, steps=False))
    made.run()
    blind.run()
    assert made.state.corrections
    assert not blind.state.corrections


def test_what_is_shown_lags_behind_the_truth() -> None:
    """The first sample of a started task is taken after its start, and its mean covers a part of the window."""
    made = sim_made.simulation(row(seconds=100.0, start_s=7.0), rules=Rules())
    seen = [
        (sample.at, sample.memory_used_mib, sample.activity.sm_active)
        for event in made.events()
        if isinstance(event, e.GpusSampled)
        for sample in event.samples
    ]
    placed_at = 5.0
    first = next(entry for entry in seen if entry[1])
    assert first[0] > placed_at + 7.0
    assert 0.0 < (first[2] or 0.0) <= 0.4


def test_what_changes_at_the_moment_of_a_look_is_seen_in_the_next() -> None:
    """Samples are taken every 5 s: the task begins, and ends, exactly then."""
    made = sim_made.simulation(row(1_000.0, seconds=100.0), row(2_000.0, seconds=100.0), rules=Rules())
    assert made.run().failed == 0


def test_tasks_that_cannot_run_there_are_named() -> None:
    with pytest.raises(Usage, match="2 GPUs") as told:
        simulation(Request(trace="t1", gpus=1))
    assert "--gpus 2" in told.value.hint
    with pytest.raises(Usage, match=r"needs 70,000 GPUs") as told:
        simulation(Request(), sim_made.trace(row(gpus=70_000)))
    assert "--gpus" not in told.value.hint


def test_a_policy_that_starts_no_task_ends_the_simulation() -> None:
    no_gpu = Policy("no_gpu", lambda _ask, _views, _last: [])
    with pytest.raises(CarmaError, match="no task runs"):
        sim_made.simulation(row(), policy=no_gpu).run()


def test_exclusive_never_shares() -> None:
    made = sim_made.simulation(row(), row(), row(), policy=exclusive.POLICY)
    assert made.run().slowdown_max == pytest.approx(1.0)


def raiser(_ask: object, _views: object, _last: object) -> list[object]:
    raise RuntimeError("oops")


def test_the_error_about_tasks_that_never_start_has_the_cores_reason() -> None:
    policy = Policy("raiser", raiser)  # type: ignore[arg-type]
    with pytest.raises(CarmaError, match=r"2 tasks wait \(1, 2\)\. Task 1: .*raiser.*RuntimeError.*oops") as told:
        sim_made.simulation(row(), row(), policy=policy).run()
    assert "…" not in str(told.value)
    with pytest.raises(CarmaError, match=r"1 task waits \(1\)"):
        sim_made.simulation(row(), policy=policy).run()
    with pytest.raises(CarmaError, match=r"6 tasks wait \(1, 2, 3, 4, 5, …\)"):
        sim_made.simulation(*[row()] * 6, policy=policy).run()


def test_a_quota_that_prevents_every_start_is_named() -> None:
    with pytest.raises(CarmaError, match=r"no task runs.*\(Quota\)"):
        simulation(Request(trace="t1", settings={"quota.gpus": "1"})).run()


def test_the_simulation_continues_while_tasks_are_still_to_arrive() -> None:
    """Those that wait are started when the last one is there, long after the others."""
    later = Policy("later", lambda ask, views, last: magm.POLICY.rank(ask, views, last) if ask.task >= 2 else [])
    made = sim_made.simulation(row(), row(1_000_000.0), policy=later)
    with pytest.raises(CarmaError, match=r"1 task waits \(1\)"):
        made.run()
    assert [run.task for run in made.runs] == [2]
