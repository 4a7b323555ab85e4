"""Optimizer steps per second and the measured slowdown: alone, beside neighbours, in pauses, and after a restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import AttemptSteps, GpusSampled, StepsCounted, UseNoted
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import Demand, Owner, StepProgress, TaskId
from carma.core.policies import first_fit
from carma.core.state import State
from carma.core.telemetry import usage
from carma.core.telemetry.measurements import MOST_POINTS
from carma.core.telemetry.step_rates import Slowdown, rate_now, slowdown
from carma.daemon.found_attempts import past_run
from carma.daemon.state_checkpoint import adopt, checkpoint, restore
from carma.store.codec import read_event, read_run, read_task, write
from carma.testing.builders import ALICE, World
from tests.unit.core.pace_world import begin

SETTLE_S = 5.0
RULES = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False, settle_s=SETTLE_S))


class Training:
    """Tasks that make steps while time passes. `per_s` has the rate of each task."""

    def __init__(self) -> None:
        self.world = World(1, rules=RULES, policy=first_fit.POLICY)
        self.per_s: dict[TaskId, float] = {}
        self.done: dict[TaskId, float] = {}

    def begin(self, per_s: float, demand: Demand | None = None, *, command: str = "x", owner: Owner = ALICE) -> TaskId:
        task = begin(self.world, demand, command=command, owner=owner)
        self.per_s[task], self.done[task] = per_s, 0.0
        return task

    def train(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.wait(1.0)
            for task, per_s in self.per_s.items():
                self.done[task] += per_s
            self.count(*self.per_s)

    def count(self, *tasks: TaskId) -> None:
        """The last step of each task was made when its whole number was reached."""
        now, world = self.world.now, self.world
        counts = []
        for task in tasks:
            steps = int(self.done[task] + 1e-9)
            late_s = (self.done[task] - steps) / self.per_s[task] if self.per_s[task] else 0.0
            if steps:
                counts.append(AttemptSteps(world.state.active[task], steps, now - late_s))
        world.emit(StepsCounted(now, tuple(counts)))

    def rate(self, task: TaskId) -> float | None:
        world = self.world
        return rate_now(world.state, world.state.tracks[world.state.active[task]], world.now)

    def slowdown(self, task: TaskId, state: State | None = None) -> Slowdown | None:
        found = state or self.world.state
        return slowdown(found, found.tasks[task], found.tasks[task].attempts[-1])

    def measured(self, task: TaskId) -> float:
        """Its slowdown, which must not be inferred."""
        found = self.slowdown(task)
        assert found is not None
        assert not found.inferred
        return found.value

    def end(self, task: TaskId) -> StepProgress | None:
        del self.per_s[task]
        self.world.end(task)
        return self.world.task(task).attempts[-1].progress


@pytest.fixture
def training() -> Training:
    return Training()


def test_a_rate_is_known_after_a_few_steps_and_seconds(training: Training) -> None:
    task = training.begin(10.0)
    training.train(4)
    assert training.rate(task) is None
    training.train(3)
    assert training.rate(task) == pytest.approx(10.0)


def test_slow_steps_are_measured_over_more_than_the_window(training: Training) -> None:
    task = training.begin(0.05)  # a step in 20 s; the window has 30 s
    training.train(90)
    assert training.rate(task) is None
    training.train(30)
    assert training.rate(task) == pytest.approx(0.05)


def test_the_rate_follows_a_change_within_the_window(training: Training) -> None:
    task = training.begin(10.0)
    training.train(60)
    training.per_s[task] = 4.0
    training.train(int(RULES.window.length_s) + 2)
    assert training.rate(task) == pytest.approx(4.0)


def test_an_evaluation_between_two_steps_does_not_count_as_slowness(training: Training) -> None:
    task = training.begin(10.0)
    training.train(40)
    training.per_s[task] = 0.0
    training.train(12)
    training.per_s[task] = 10.0
    training.train(6)
    assert training.rate(task) == pytest.approx(10.0)
    progress = training.end(task)
    assert progress is not None
    assert progress.per_s == pytest.approx(10.0, rel=0.01)


def test_in_a_long_pause_the_rate_is_unknown_and_not_0(training: Training) -> None:
    task = training.begin(10.0)
    training.train(40)
    training.per_s[task] = 0.0
    training.train(int(RULES.window.stale_s) + 2)
    assert training.rate(task) is None


def test_counts_that_are_rarely_written_are_no_pause(training: Training) -> None:
    task = training.begin(10.0)
    rarely_s = 2.0 * RULES.window.stale_s
    for _ in range(4):
        training.world.wait(rarely_s)
        training.done[task] += 10.0 * rarely_s
        training.count(task)
    training.world.wait(1.5 * rarely_s)
    assert training.rate(task) == pytest.approx(10.0)
    training.world.wait(rarely_s)
    assert training.rate(task) is None


def test_a_process_that_starts_again_from_0_gives_a_new_window(training: Training) -> None:
    task = training.begin(10.0)
    training.train(40)
    training.done[task], training.per_s[task] = 0.0, 5.0
    training.train(2)
    assert training.rate(task) is None
    training.train(10)
    assert training.rate(task) == pytest.approx(5.0)


def test_a_settled_task_alone_has_its_own_rate_as_the_reference(training: Training) -> None:
    task = training.begin(10.0)
    training.train(20)
    assert training.measured(task) == pytest.approx(1.0)
    training.begin(10.0)
    training.per_s[task] = 8.0
    training.train(1)
    assert training.rate(task) is None, "the steps before the neighbour came say nothing about now"
    training.train(20)
    assert training.measured(task) == pytest.approx(1.25)


def test_a_task_that_was_never_alone_has_no_measured_slowdown(training: Training) -> None:
    first, second = training.begin(10.0), training.begin(10.0)
    training.train(30)
    assert training.rate(first) == pytest.approx(10.0)
    for task in (first, second):
        found = training.slowdown(task)
        assert found is not None, "the activity of both was seen for long enough"
        assert found.inferred


def test_beside_a_foreign_process_a_task_is_not_alone(training: Training) -> None:
    training.world.foreign[next(iter(training.world.state.gpus))] = 2_000
    task = training.begin(10.0)
    training.train(30)
    assert training.slowdown(task) is None


def test_once_the_neighbour_has_left_the_task_measures_itself_alone(training: Training) -> None:
    task, other = training.begin(5.0), training.begin(5.0)
    training.train(20)
    training.end(other)
    training.per_s[task] = 10.0
    training.train(20)
    progress = training.end(task)
    assert progress is not None
    assert progress.alone_per_s == pytest.approx(10.0)
    assert progress.steps == 300
    assert progress.per_s == pytest.approx(7.5, rel=0.05)
    found = training.slowdown(task)
    assert found is not None
    assert found.value == pytest.approx(10.0 / 7.5, rel=0.05)
    assert not found.inferred


def test_history_knows_the_rate_alone_of_a_command_that_now_shares_its_gpu(training: Training) -> None:
    task, _ = training.begin(5.0), training.begin(5.0)
    world = training.world
    estimate = world.task(task).estimate
    assert estimate is not None
    world.state.put(replace(world.task(task), estimate=replace(estimate, alone_steps_per_s=8.0)))
    training.train(20)
    assert training.measured(task) == pytest.approx(1.6)


def test_without_steps_the_slowdown_is_inferred_if_every_demand_is_known(training: Training) -> None:
    busy = Demand(0.9, 0.4, 0.4, 1.0, 0.8)
    task = training.begin(0.0, busy)
    training.train(5)
    assert training.slowdown(task) == Slowdown(1.0, True)
    training.begin(0.0, busy)
    training.train(5)
    found = training.slowdown(task)
    assert found is not None
    assert found.inferred
    assert found.value > 1.3
    training.begin(0.0)  # of unknown demand
    training.train(5)
    assert training.slowdown(task) is None


def test_before_its_first_use_of_the_gpu_nothing_is_inferred(training: Training) -> None:
    world = training.world
    task = world.submit(1_000)
    world.settle()
    world.start(task)
    assert training.slowdown(task) is None


def restarted(training: Training) -> State:
    """The state of a daemon that loads what was stored last."""
    world = training.world
    note = usage.note(world.state)
    assert read_event(write(note)) == note
    world.emit(note)
    saved, _ = checkpoint(world.state, 1)
    tasks = tuple(read_task(write(task)) for task in saved.tasks)
    state = restore(world.state.rules, first_fit.POLICY, replace(saved, tasks=tasks))
    adopt(state)
    return state


def test_after_a_restart_the_rate_alone_is_known(training: Training) -> None:
    task = training.begin(10.0)
    training.train(20)
    training.begin(10.0)
    training.per_s[task] = 8.0
    training.train(20)
    training.world.state = restarted(training)
    assert training.rate(task) is None
    training.train(10)
    assert training.measured(task) == pytest.approx(1.25)
    progress = training.end(task)
    assert progress is not None
    assert progress.steps == 440
    assert progress.per_s == pytest.approx(440 / 50, rel=0.05)


def test_a_past_run_keeps_the_progress_of_its_attempt(training: Training) -> None:
    task = training.begin(10.0)
    training.train(20)
    key = training.world.state.active[task]
    progress = training.end(task)
    run = past_run(training.world.state, key, collocated=False)
    assert run is not None
    assert run.progress == progress
    assert read_run(write(run)) == run


def test_events_of_an_older_version_have_no_progress() -> None:
    ended = '{"event":"attempt_ended","at":1.0,"key":{"task":1,"attempt":1},"outcome":{"kind":"succeeded"}}'
    noted = '{"event":"use_noted","at":1.0,"attempts":[{"key":{"task":1,"attempt":1},"used_s":2.0}]}'
    assert getattr(read_event(ended), "progress", "missing") is None
    event = read_event(noted)
    assert isinstance(event, UseNoted)
    assert event.attempts[0].progress is None


def test_counts_of_an_attempt_that_is_over_are_ignored(training: Training) -> None:
    task = training.begin(10.0)
    training.train(10)
    key = training.world.state.active[task]
    training.end(task)
    training.world.emit(StepsCounted(training.world.now, (AttemptSteps(key, 10**15, training.world.now),)))
    progress = training.world.task(task).attempts[-1].progress
    assert progress is not None
    assert progress.steps == 100
    training.world.emit(GpusSampled(training.world.now + 1, ()))


def test_a_clock_that_hardly_advances_does_not_fill_the_memory(training: Training) -> None:
    """The user of the task writes the times of its steps."""
    task = training.begin(0.0)
    world = training.world
    key, began = world.state.active[task], world.now - 1.0
    for steps in range(1, 3 * MOST_POINTS):
        world.emit(StepsCounted(world.now, (AttemptSteps(key, steps, began + steps * 1e-6),)))
    record = world.state.tracks[key].step_record
    assert len(record.points) == MOST_POINTS
    assert record.newest is not None
    assert record.newest.steps == 3 * MOST_POINTS - 1
