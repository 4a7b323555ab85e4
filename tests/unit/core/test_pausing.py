"""A paused task keeps its memory and nothing else: no progress, no time, no demand, and nothing is learned of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.commands import PreemptAttempt, SetPaused, StopAttempt
from carma.core.model.events import PreemptionRequested, StopRequested, TaskPaused, TaskUnpaused, TaskWarned
from carma.core.model.outcome import TimedOut
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import SaveSignal, TaskId, WarnSignal
from carma.core.pausing import unpausable
from carma.core.policies import first_fit
from carma.core.telemetry.pace import NO_DEMAND
from carma.daemon.found_attempts import past_run
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.testing.builders import World
from tests.unit.core.pace_world import FULL, GPU0, HALF, begin, believed, seen_of, track_of
from tests.unit.core.test_step_rates import Training

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=5.0))


def pause(world: World, task: TaskId, by: str = "alice", until: float | None = None) -> None:
    world.emit(TaskPaused(world.now, task, by, "a demo", until))


def unpause(world: World, task: TaskId) -> None:
    world.emit(TaskUnpaused(world.now, task, "alice"))


@pytest.fixture
def world() -> World:
    return World(1, rules=OPEN, policy=first_fit.POLICY)


def test_a_repeated_or_late_event_changes_nothing(world: World) -> None:
    task = begin(world)
    pause(world, task)
    paused_at = world.now
    world.wait(3)
    pause(world, task, by="bob")
    unpaused = world.task(task).paused
    assert unpaused is not None
    assert (unpaused.by, unpaused.at) == ("alice", paused_at)
    unpause(world, task)
    unpause(world, task)
    assert world.task(task).paused is None
    assert [one for one in world.commands if isinstance(one, SetPaused)] == [
        SetPaused(world.task(task).key, True),
        SetPaused(world.task(task).key, False),
    ]
    world.end(task)
    pause(world, task)
    assert world.task(task).attempts[-1].paused_s == pytest.approx(3.0)


def test_a_users_pause_replaces_one_by_carma_that_would_end(world: World) -> None:
    task = begin(world)
    pause(world, task, by="carma", until=world.now + 60)
    pause(world, task)
    paused = world.task(task).paused
    assert paused is not None
    assert (paused.by, paused.until) == ("alice", None)


def test_its_time_limit_and_the_warning_before_it_stand_still(world: World) -> None:
    task = world.submit(1_000, time_limit_s=100.0, warn=WarnSignal(10, 20.0))
    world.settle()
    world.start(task)
    world.wait(50)
    world.settle()
    pause(world, task)
    world.wait(500)
    assert world.settle() == []
    unpause(world, task)
    world.wait(29)
    assert world.settle() == []
    world.wait(1)
    assert [type(event) for event in world.settle()] == [TaskWarned]
    world.wait(19)
    assert world.settle() == []
    world.wait(1)
    (stop,) = world.settle()
    assert isinstance(stop, StopRequested)
    assert stop.ending == TimedOut(100.0)


def test_its_run_time_progress_and_expected_end_have_no_pauses(world: World) -> None:
    task = begin(world, HALF, runtime_s=100.0)
    began_at = world.now
    world.wait(40)
    pause(world, task)
    assert track_of(world, task).done_by(world.now) == pytest.approx(40.0, abs=0.1)
    world.wait(300)
    assert track_of(world, task).done_by(world.now) == pytest.approx(40.0, abs=0.1)
    assert world.view(0).holders[0].ends_at == pytest.approx(world.now + 60.0, abs=0.1), "if it continued now"
    unpause(world, task)
    assert world.view(0).holders[0].ends_at == pytest.approx(world.now + 60.0, abs=0.1)
    world.wait(60)
    assert world.now == pytest.approx(began_at + 400.0, abs=0.1)
    world.end(task)
    run = past_run(world.state, world.task(task).key, False)
    assert run is not None
    assert run.runtime_s == pytest.approx(100.0, abs=0.1)
    assert run.alone is not None
    assert run.alone.pace == pytest.approx(1.0, abs=0.01)


def test_beside_a_paused_task_a_task_runs_as_alone_and_its_activity_is_its_own(world: World) -> None:
    first, second = begin(world, FULL), begin(world, FULL)
    slow = track_of(world, first).rate
    world.wait(5)
    pause(world, second)
    assert believed(world, second) == NO_DEMAND
    assert world.view(0).holders[1].demand == NO_DEMAND
    assert track_of(world, first).rate == 1.0 > slow
    energy_j, used_s = track_of(world, second).energy_j, track_of(world, second).used_s
    world.activity[GPU0] = (0.7, 0.3, 0.3)
    world.wait(60)
    assert (track_of(world, second).energy_j, track_of(world, second).used_s) == (energy_j, used_s)
    assert seen_of(world, first).solo.alone_s > 15.0
    assert seen_of(world, first).solo.sm_active == pytest.approx(0.7)
    assert seen_of(world, second).solo.sm_active < 0.7
    unpause(world, second)
    assert track_of(world, first).rate == slow
    assert world.view(0).booked_mib == 2_000, "its memory stays booked all the time"


def test_a_task_does_not_settle_while_it_is_paused(world: World) -> None:
    task = world.submit(20_000, source="history")
    world.settle()
    world.start(task, mib=1_000)
    world.wait(4)
    world.settle()
    pause(world, task)
    world.wait(60)
    assert world.settle() == [], "its booking does not shrink to what it held at that moment"
    assert world.view(0).holders[0].warming is not None
    unpause(world, task)
    world.wait(1)
    assert seen_of(world, task).settled_at is None
    world.wait(10)
    assert seen_of(world, task).settled_at is not None


def test_a_pause_is_no_slow_step() -> None:
    training = Training()
    task = training.begin(10.0)
    training.train(20)
    pause(training.world, task)
    training.per_s[task] = 1e-9
    training.train(60)
    assert training.rate(task) is None
    assert training.slowdown(task) is None
    unpause(training.world, task)
    training.per_s[task] = 10.0
    training.train(7)
    assert training.rate(task) == pytest.approx(10.0)
    progress = training.end(task)
    assert progress is not None
    assert progress.per_s == pytest.approx(10.0, rel=0.01)


def test_a_request_to_stop_or_to_save_ends_the_pause_first(world: World) -> None:
    task = world.submit(1_000, checkpoint=SaveSignal(10, 30.0))
    world.settle()
    world.start(task)
    key = world.task(task).key
    pause(world, task)
    commands = world.emit(PreemptionRequested(world.now, task, "alice", 10, 30.0))
    assert commands == [SetPaused(key, False), PreemptAttempt(key, 10, world.now)]
    pause(world, task)
    assert world.task(task).paused is None, "it has to react"
    other = begin(world)
    pause(world, other)
    world.wait(2)
    assert world.stop(other) == [SetPaused(world.task(other).key, False), StopAttempt(world.task(other).key, 5.0)]
    assert world.task(other).attempts[-1].paused_s == pytest.approx(2.0)


def test_a_task_that_ends_in_its_pause_ends_as_usual(world: World) -> None:
    task = begin(world)
    world.wait(10)
    pause(world, task)
    world.wait(7)
    world.end(task)
    world.settle()
    assert world.outcome(task) is not None
    assert world.task(task).attempts[-1].paused_s == pytest.approx(7.0)


def test_a_pause_outlives_a_checkpoint_of_the_state(world: World) -> None:
    task = begin(world, HALF, runtime_s=100.0)
    world.wait(30)
    pause(world, task)
    world.wait(50)
    again = restore(OPEN, first_fit.POLICY, checkpoint(world.state, len(world.log))[0])
    track = again.tracks[again.active[task]]
    assert again.tasks[task] == world.task(task)
    assert track.ran_s(world.now) == pytest.approx(30.0, abs=0.1)
    assert track.done_by(world.now + 50.0) == pytest.approx(30.0, abs=0.1)


@pytest.mark.parametrize(
    ("command", "gpus", "word"),
    [
        (("torchrun", "--nproc-per-node=2", "train.py"), 1, "torchrun"),
        (("/opt/bin/accelerate", "launch", "train.py"), 1, "accelerate"),
        (("python", "-m", "torch.distributed.run", "train.py"), 1, "torch.distributed.run"),
        (("sh", "-c", "cd x && torchrun train.py"), 1, "torchrun"),
        (("python", "train.py"), 2, "2 GPUs"),
    ],
)
def test_a_task_of_several_processes_is_not_paused(command: tuple[str, ...], gpus: int, word: str) -> None:
    world = World(2, rules=OPEN, policy=first_fit.POLICY)
    task = world.submit(1_000, gpus=gpus)
    known = world.task(task)
    world.state.tasks[task] = replace(known, spec=replace(known.spec, command=command))
    world.settle()
    world.start(task)
    world.wait(2)
    assert word in (unpausable(world.state, world.task(task)) or "")
