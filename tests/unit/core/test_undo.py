"""A task that is measured to be slowed down too much: its GPU closes, its newest neighbour moves or stands still."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import Durable, PreemptionRequested, TaskPaused, TaskUnpaused
from carma.core.model.outcome import Failed
from carma.core.model.settings import Preemption, Rules, Undo
from carma.core.model.values import AttemptKey, Demand, Gpu, GpuId, GpuSample, ProcessUse, SaveSignal, TaskId
from carma.core.policies import first_fit
from carma.core.undo import TEST_S
from carma.testing.builders import World
from tests.unit.core.pace_world import HALF
from tests.unit.core.test_step_rates import RULES, Training

LIMIT_S = 100.0
ON = replace(RULES, undo=Undo(enabled=True, after_s=60.0, pause_limit_s=LIMIT_S))


class Shared(Training):
    """The first task makes 10 steps per second alone, and 4 beside the second, which is not slowed down."""

    def __init__(self, rules: Rules = ON, **second: object) -> None:
        super().__init__()
        self.world = World(1, rules=rules, policy=first_fit.POLICY)
        self.first = self.begin(10.0)
        self.train(20)
        self.second = self.join(**second)
        self.per_s[self.first] = 4.0

    def join(self, **spec: object) -> TaskId:
        task = self.world.submit(1_000, **spec)  # type: ignore[arg-type]
        self.world.settle()
        self.world.start(task)
        self.per_s[task], self.done[task] = 10.0, 0.0
        return task

    def go(self, seconds: int) -> list[Durable]:
        """Time passes, second by second, with what is due; a paused task makes no steps."""
        done: list[Durable] = []
        for _ in range(seconds):
            for task in self.per_s:
                if self.world.task(task).paused is not None:
                    self.done[task] -= self.per_s[task]
            self.train(1)
            done += [one for one in self.world.settle() if isinstance(one, ANSWERS)]
        return done

    def long_before(self) -> Shared:
        """The second has run for long enough that its pause can last for LIMIT_S."""
        self.per_s[self.first] = 6.0
        assert self.go(250) == []
        self.per_s[self.first] = 4.0
        return self

    def until_paused(self) -> TaskPaused:
        for _ in range(120):
            for event in self.go(1):
                assert isinstance(event, TaskPaused)
                return event
        raise AssertionError("no task was paused")


ANSWERS = (TaskPaused, TaskUnpaused, PreemptionRequested)


def test_the_newest_task_is_paused_after_a_while_and_the_gpu_takes_no_more() -> None:
    shared = Shared()
    assert shared.go(60) == []
    assert shared.world.view(0).slowed is None
    (event,) = shared.go(15)
    assert isinstance(event, TaskPaused)
    assert (event.task, event.by, event.slowed, event.slowdown) == (shared.second, "carma", shared.first, 2.5)
    assert event.reason == f"beside it task {shared.first} takes 2.50 times as long as alone (limit 1.8)"
    third = shared.world.submit(1_000)
    assert shared.world.settle() == []
    refusal = shared.world.refusal(third, 0)
    assert refusal is not None
    assert (refusal.code, f"task {shared.first}" in refusal.sentence) == ("Slowed", True)


def test_without_a_task_that_may_be_paused_the_gpu_is_closed_for_a_bounded_time() -> None:
    shared = Shared(pause=False)
    assert shared.go(80) == []
    third = shared.world.submit(1_000)
    assert shared.go(20) == []
    refusal = shared.world.refusal(third, 0)
    assert refusal is not None
    assert "2.50 times" in refusal.sentence
    shared.go(600)
    assert shared.world.placed(third), "no pause has confirmed what its steps say"


def test_a_neighbour_that_is_faster_meanwhile_confirms_it_and_after_its_bound_the_task_goes_on() -> None:
    shared = Shared()
    event = shared.until_paused()
    assert event.until is not None
    paused_s = event.until - event.at
    world = shared.world
    track = world.state.tracks[world.task(shared.second).key]
    spent_s = track.ran_s(event.at) + paused_s
    assert spent_s == pytest.approx(1.5 * track.done_by(event.at)), "with it the task itself reaches the cap"
    shared.per_s[shared.first] = 10.0
    (end,) = shared.go(int(paused_s) + 1)
    assert isinstance(end, TaskUnpaused)
    assert (end.task, end.by, end.faster) == (shared.second, "carma", True)
    shared.per_s[shared.first] = 4.0
    assert shared.go(400) == [], "not paused again for this neighbour"
    assert shared.world.view(0).slowed is not None, "what was confirmed keeps others away for as long as it lasts"
    third = shared.world.submit(1_000)
    shared.world.settle()
    assert not shared.world.placed(third)
    shared.per_s[shared.first] = 9.0
    shared.go(40)
    assert shared.world.placed(third), "it is over"


def test_a_claim_that_a_pause_refutes_ends_it_early_and_has_no_further_effect() -> None:
    shared = Shared().long_before()
    shared.until_paused()
    (end,) = shared.go(int(TEST_S) + 1)
    assert isinstance(end, TaskUnpaused)
    assert end.faster is False
    assert end.reason == f"task {shared.first} was not faster meanwhile"
    third = shared.join()
    assert shared.go(500) == []
    assert shared.world.placed(third)
    assert shared.world.view(0).slowed is None


def test_steps_that_stop_altogether_confirm_nothing() -> None:
    shared = Shared()
    event = shared.until_paused()
    shared.per_s[shared.first] = 1e-9
    assert event.until is not None
    (end,) = shared.go(int(event.until - event.at) + 1)
    assert isinstance(end, TaskUnpaused)
    assert end.faster is False


def test_the_pause_ends_when_it_has_no_purpose_any_more() -> None:
    shared = Shared()
    shared.until_paused()
    shared.end(shared.first)
    (end,) = shared.go(1)
    assert isinstance(end, TaskUnpaused)
    assert (end.task, end.faster) == (shared.second, None)


def test_when_another_task_has_left_the_rest_is_measured_anew() -> None:
    shared = Shared()
    third = shared.join()
    shared.per_s[third] = 10.0
    event = shared.until_paused()
    assert event.task == third, "the newest"
    shared.end(shared.second)
    (end,) = shared.go(1)
    assert isinstance(end, TaskUnpaused)
    assert (end.task, end.faster) == (third, None)


@pytest.mark.parametrize(
    "why_not", ["off", "--no-pause", "torchrun", "two processes", "processes unknown", "paused already", "limit 0"]
)
def test_a_task_is_not_paused(why_not: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"off": Undo(enabled=False), "limit 0": Undo(enabled=True, pause_limit_s=0.0)}
    rules = replace(ON, undo=off[why_not]) if why_not in off else ON
    shared = Shared(rules, **({"pause": False} if why_not == "--no-pause" else {}))
    world = shared.world
    task = world.task(shared.second)
    if why_not == "torchrun":
        world.state.tasks[task.id] = replace(task, spec=replace(task.spec, command=("torchrun", "x.py")))
    if why_not == "processes unknown":
        world.no_processes.add(GpuId("GPU-0"))
    if why_not == "two processes":
        sample = world._sample
        extra = ProcessUse(pid=7, memory_mib=1, attempt=AttemptKey(task.id, 1))
        sample = world._sample

        def with_two(found: Gpu) -> GpuSample:
            one = sample(found)
            return replace(one, processes=(*(one.processes or ()), extra))

        monkeypatch.setattr(world, "_sample", with_two)
    if why_not == "paused already":
        world.emit(TaskPaused(world.now, task.id, "alice"))
        shared.per_s[shared.second] = 1e-9
    assert shared.go(200) == []


def test_a_task_can_never_have_an_earlier_one_paused() -> None:
    shared = Shared()
    shared.world.end(shared.second)
    shared.per_s.pop(shared.second)
    late = shared.world.submit(1_000, source="history")
    estimate = shared.world.task(late).estimate
    assert estimate is not None
    shared.world.state.tasks[late] = replace(
        shared.world.task(late), estimate=replace(estimate, alone_steps_per_s=50.0)
    )
    shared.world.settle()
    shared.world.start(late)
    shared.per_s[late], shared.done[late], shared.per_s[shared.first] = 10.0, 0.0, 10.0
    assert shared.go(200) == []
    assert shared.measured(late) == pytest.approx(5.0)
    assert shared.world.view(0).slowed is not None


def test_all_pauses_for_one_task_within_an_hour_are_bounded() -> None:
    shared = Shared().long_before()
    event = shared.until_paused()
    assert event.until == pytest.approx(event.at + LIMIT_S)
    shared.per_s[shared.first] = 10.0
    shared.go(int(LIMIT_S) + 1)
    another = shared.join()
    shared.per_s[shared.first] = 4.0
    assert shared.go(150) == []
    first = shared.world.task(shared.first)
    assert first.relief is not None
    assert (first.relief.confirmed, first.relief.seconds) == (True, LIMIT_S)
    next_hour = replace(first.relief, since=first.relief.since - 3600.0)
    shared.world.state.tasks[first.id] = replace(first, relief=next_hour)
    assert shared.until_paused().task == another


def test_a_task_that_saves_checkpoints_is_moved_instead_and_once() -> None:
    moves = replace(ON, preemption=Preemption(enabled=True, after_s=60.0, least_run_s=30.0, again_s=500.0))
    shared = Shared(moves, checkpoint=SaveSignal(10, 30.0))
    (event,) = shared.go(75)
    assert isinstance(event, PreemptionRequested)
    assert (event.task, event.by, event.room_for) == (shared.second, "carma", None)
    assert f"on its GPU task {shared.first} takes 2.50 times" in event.reason
    shared.per_s.pop(shared.second)
    shared.world.end(shared.second, Failed(3))
    shared.go(10)
    assert shared.world.placed(shared.second), "there is no other GPU"
    shared.world.start(shared.second)
    shared.per_s[shared.second] = 10.0
    assert shared.until_paused().task == shared.second, "it could be moved for ever"


def test_what_is_only_inferred_pauses_no_task() -> None:
    shared = Shared()
    world = shared.world
    shared.per_s.pop(shared.first)
    for task, demand in ((shared.first, HALF), (shared.second, Demand(0.05, 0.02, 0.02))):
        known = world.task(task)
        assert known.estimate is not None
        estimate = replace(known.estimate, demand=demand, alone_steps_per_s=10.0 if task == shared.second else None)
        world.state.tasks[task] = replace(known, estimate=estimate)
    world.activity[GpuId("GPU-0")] = (0.1, 0.05, 0.05)
    assert shared.go(300) == []
    found = shared.slowdown(shared.first)
    assert found is not None
    assert found.inferred
    assert found.value > 1.8
    assert world.view(0).slowed is not None, "but it keeps others away"


def test_the_limit_is_on_the_whole_run_of_a_task_whose_run_time_is_known() -> None:
    shared = Shared()
    track = shared.world.state.tracks[shared.world.task(shared.first).key]
    track.alone_s = 40.0  # half of it was done alone
    track.done_s, track.paced_at = 35.0, shared.world.now
    assert shared.go(70) == []


def test_with_a_pause_the_log_and_the_state_agree() -> None:
    """`World` checks the invariants after each event; here the answers of a second scheduler as well."""
    shared = Shared()
    shared.until_paused()
    restored = shared.world.task(shared.second)
    assert restored.paused is not None
    shared.world.stop(shared.second)
    assert shared.world.task(shared.second).paused is None
    shared.per_s.pop(shared.second)
    shared.world.end(shared.second, Failed(143))
    attempt = shared.world.task(shared.second).attempts[-1]
    assert attempt.paused_by_carma_s == attempt.paused_s
    assert attempt.paused_for == (shared.first,)
