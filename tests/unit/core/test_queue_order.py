"""The order of the queue, what holds a task back, and the reasons that are shown."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import GpuDrained, GpuResumed, TaskChanged, TaskHeld, TaskReleased
from carma.core.model.outcome import Cancelled, Failed, Outcome, Succeeded
from carma.core.model.settings import Gate, PlacementRules, QueueRules, Rules, WarmUp
from carma.core.model.status import Queued
from carma.core.model.task import Task
from carma.core.model.values import ArrayPlace, Dependency, Estimate, GpuId, TaskId, TaskSpec
from carma.core.policies import exclusive
from carma.core.scheduling.eligibility import Waiting, ask_of
from carma.core.scheduling.explanation import explain, try_now, waiting
from carma.core.scheduling.scheduling_pass import LOGGED_VERDICTS, MAX_PLACEMENTS, schedule
from carma.testing.builders import ALICE, World

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), placement=PlacementRules(tasks_per_gpu=100))


def order(world: World) -> list[int]:
    return [task for task, _ in world.placements()]


def test_first_come_first_served() -> None:
    world = World(1, policy=exclusive.POLICY)
    tasks = [world.submit(1_000) for _ in range(3)]
    for task in tasks:
        world.settle()
        assert world.placed(task)
        world.end(task)
    assert order(world) == tasks


def test_priority_goes_before_age() -> None:
    world = World(1, policy=exclusive.POLICY)
    low, normal, high = (world.submit(1_000, priority=priority) for priority in (-1, 0, 1))
    for task in (high, normal, low):
        world.settle()
        assert world.placed(task)
        world.end(task)


def test_a_changed_priority_moves_a_waiting_task() -> None:
    world = World(1, policy=exclusive.POLICY)
    world.submit(1_000)
    late = world.submit(1_000)
    world.emit(TaskChanged(world.now, late, priority=9))
    world.settle()
    assert order(world) == [late]


def test_a_hold_keeps_a_task_back_and_not_those_behind_it() -> None:
    world = World(1)
    held, free = world.submit(1_000, held=True), world.submit(1_000)
    world.settle()
    assert order(world) == [free]
    assert (world.why(held).code, world.why(held).sentence) == ("Held", "held; `carma release 1` lets it start")
    world.emit(TaskReleased(world.now, held))
    world.start(free)
    world.wait(30)
    world.settle()
    assert world.placed(held)


def test_a_waiting_task_can_be_held_later() -> None:
    world = World(1)
    task = world.submit(1_000)
    world.emit(TaskHeld(world.now, task))
    world.settle()
    assert not world.placed(task)


def test_a_begin_time_is_waited_for() -> None:
    world = World(1)
    task = world.submit(1_000, begin_at=world.now + 90)
    world.settle()
    assert (world.why(task).code, world.why(task).sentence) == ("BeginTime", "begins in 01:30")
    world.wait(89)
    assert world.settle() == []
    world.wait(1)
    world.settle()
    assert world.placed(task)


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_array_runs_at_most_so_many_at_once(at_once: int) -> None:
    world = World(4)
    first = TaskId(1)
    tasks = [world.submit(1_000, array=ArrayPlace(first, index, at_once)) for index in range(5)]
    other = world.submit(1_000)
    world.settle()
    assert order(world) == [*tasks[:at_once], other]
    assert world.why(tasks[-1]).code == "ArrayLimit"
    world.end(tasks[0])
    world.settle()
    assert world.placed(tasks[at_once])
    assert not world.placed(tasks[at_once + 1])


@pytest.mark.parametrize(
    ("when", "outcome", "starts"),
    [
        ("ok", Succeeded(), True),
        ("ok", Failed(3), False),
        ("notok", Succeeded(), False),
        ("notok", Failed(3), True),
        ("any", Succeeded(), True),
        ("any", Failed(3), True),
    ],
)
def test_dependencies(when: str, outcome: Outcome, starts: bool) -> None:
    world = World(2)
    first = world.submit(1_000)
    second = world.submit(1_000, after=(Dependency(first, when),))  # type: ignore[arg-type]
    world.settle()
    assert (world.why(second).code, world.why(second).sentence) == ("Dependency", "waits for task 1")
    world.end(first, replace(outcome, message="my password is 1234") if isinstance(outcome, Failed) else outcome)
    world.settle()
    assert world.placed(second) is starts
    if not starts:
        ended = "succeeded" if isinstance(outcome, Succeeded) else "failed with exit code 3"
        wanted = "succeed" if when == "ok" else "fail"
        assert world.outcome(second) == Cancelled("carma", f"it waited for task 1 to {wanted}, but that task {ended}")


def test_on_a_drained_server_that_is_the_reason_for_all() -> None:
    world = World(2)
    first, second = world.submit(1_000), world.submit(1_000)
    newcomer = Task(id=TaskId(0), owner=ALICE, spec=world.task(first).spec, submitted_at=0.0, status=Queued(0.0))
    world.emit(GpuDrained(world.now, None, "new fans"))
    assert world.settle() == []
    assert world.why(first) == Waiting("Drained", "the server is drained: new fans")
    assert explain(world.state, first, world.now).reason == "the server is drained: new fans"
    assert world.why(second) == Waiting("Drained", "the server is drained: new fans")
    assert try_now(world.state, newcomer, world.now).reason == "the server is drained: new fans"
    world.emit(GpuResumed(world.now, None))
    for index in range(2):
        world.emit(GpuDrained(world.now, GpuId(f"GPU-{index}")))
    assert try_now(world.state, newcomer, world.now).reason == "every GPU is drained"


def test_a_broken_dependency_breaks_those_behind_it_and_each_says_only_its_own_reason() -> None:
    world = World(1)
    tasks = [world.submit(1_000)]
    for _ in range(20):
        tasks.append(world.submit(1_000, after=(Dependency(tasks[-1], "ok"),)))
    world.settle()
    world.stop(tasks[0])
    world.end(tasks[0])
    world.settle()
    last = world.outcome(tasks[-1])
    assert last == Cancelled("carma", "it waited for task 20 to succeed, but that task was cancelled by carma")
    assert world.outcome(tasks[1]) == Cancelled(
        "carma", "it waited for task 1 to succeed, but that task was cancelled by alice"
    )


def test_two_dependencies_are_both_waited_for() -> None:
    world = World(4)
    one, two = world.submit(1_000), world.submit(1_000)
    both = world.submit(1_000, after=(Dependency(one, "ok"), Dependency(two, "any")))
    world.settle()
    world.end(one)
    world.settle()
    assert not world.placed(both)
    world.end(two, Failed(1))
    world.settle()
    assert world.placed(both)


# -- what a task asks for --------------------------------------------------------------------------------------------
def test_problem_17_an_estimate_above_every_card_gets_the_largest_alone() -> None:
    world = World([24_576, 40_960])
    task = world.submit(48_000, source="gpumemnet")
    world.settle()
    assert world.gpus_of(task) == (1,)
    assert world.task(task).attempts[-1].placement.booking.alone


def test_problem_17_an_estimate_of_nearly_a_card_may_still_share_it() -> None:
    world = World(1)
    task = world.submit(40_000, source="gpumemnet")
    world.settle()
    assert world.task(task).attempts[-1].placement.booking.alone is False


def test_a_guess_above_every_card_starts_although_the_driver_keeps_some_memory() -> None:
    world = World(1)
    world.foreign[next(iter(world.state.gpus))] = 200
    world.wait(5)
    task = world.submit(99_000, source="history")
    world.settle()
    assert world.placed(task)


def test_a_guess_is_held_against_the_cards_that_a_gang_can_have() -> None:
    world = World([81_920, 40_960, 40_960])
    gang = world.submit(60_000, source="history", gpus=2)
    world.settle()
    assert len(world.gpus_of(gang)) == 2


def test_a_guess_is_held_against_the_cards_that_take_tasks() -> None:
    world = World([81_920, 40_960], rules=Rules(placement=PlacementRules(gpus=("1",))))
    task = world.submit(60_000, source="history")
    world.settle()
    assert world.gpus_of(task) == (1,)


# -- what is shown ----------------------------------------------------------------------------------------------------
def test_explain_has_an_entry_for_every_gpu_in_every_state() -> None:
    world = World(3)
    running, recovering, finished = world.run(1_000), world.run(1_000), world.run(1_000)
    world.oom(recovering)
    world.end(finished)
    world.settle()
    starting = world.submit(1_000)
    world.settle()
    assert world.placed(starting)
    waiting_task = world.submit(40_000, gpus=3)
    held = world.submit(1_000, held=True)
    depends = world.submit(1_000, after=(Dependency(running),))
    never = world.submit(1_000)
    world.stop(never)
    for task in (running, starting, waiting_task, held, depends, recovering, finished, never):
        decision = explain(world.state, task, world.now)
        assert [verdict.gpu for verdict in decision.verdicts] == ["GPU-0", "GPU-1", "GPU-2"], world.task(task).status
        assert decision.reason


def test_a_running_task_is_explained_as_it_was_decided() -> None:
    world = World([40_960, 8_192])
    task = world.submit(10_000)
    world.settle()
    decision = explain(world.state, task, world.now)
    assert decision.verdicts[0].chosen
    assert decision.verdicts[0].parts[0].value == 40_960
    refusal = decision.verdicts[1].refusal
    assert refusal is not None
    assert refusal.sentence == "needs 9.8 GiB; has room for 8.0 GiB of 8.0 GiB (0 MiB booked)"
    world.end(task)
    world.settle()
    over = explain(world.state, task, world.now)
    assert over.verdicts == decision.verdicts, "it can still be told afterwards"
    assert over.reason == "succeeded"
    assert over.placement is None


def test_on_a_large_server_the_log_keeps_the_chosen_gpus_and_some_of_the_others() -> None:
    world = World([8_192] * 39 + [40_960])
    task = world.submit(10_000)
    world.settle()
    assert len(world.task(task).attempts[-1].verdicts) == LOGGED_VERDICTS
    decision = explain(world.state, task, world.now)
    assert len(decision.verdicts) == 40
    assert [verdict.gpu for verdict in decision.verdicts if verdict.chosen] == ["GPU-39"]


def test_nothing_is_chosen_for_a_task_whose_turn_it_is_not() -> None:
    world = World(2)
    held = world.submit(1_000, held=True)
    decision = explain(world.state, held, world.now)
    assert decision.code == "Held"
    assert decision.placement is None
    assert [verdict.refusal for verdict in decision.verdicts] == [None, None]
    assert not any(verdict.chosen for verdict in decision.verdicts)


def test_what_is_shown_is_what_happens() -> None:
    """`explain` before the fact names the GPUs that `schedule` then takes, for each of a mixed queue."""
    world = World(3)
    world.run(20_000)
    wanted = ((30_000, 1), (30_000, 2), (5_000, 1), (39_000, 1), (2_000, 1))
    tasks = [world.submit(mib, gpus=gpus) for mib, gpus in wanted]
    foretold = {task: explain(world.state, task, world.now).placement for task in tasks}
    world.settle()
    for task in tasks:
        status = world.task(task)
        assert foretold[task] == (status.attempts[-1].placement if status.attempts else None)


def test_far_behind_the_head_the_reason_is_the_queue() -> None:
    world = World(1, rules=Rules(queue=QueueRules(backfill_depth=2)))
    world.run(30_000)
    tasks = [world.submit(20_000 + place) for place in range(6)]
    world.settle()
    reasons = waiting(world.state, world.now)
    assert reasons[tasks[0]].code == "Memory"
    assert (reasons[tasks[5]].code, reasons[tasks[5]].sentence) == (
        "Priority",
        "5 tasks are before it in the queue; task 2 waits for a GPU first",
    )


def test_reasons_are_given_for_those_that_were_asked_for() -> None:
    world = World(1, policy=exclusive.POLICY)
    running = world.run(1_000)
    one, two = world.submit(1_000), world.submit(1_000)
    assert set(waiting(world.state, world.now, [two, running, TaskId(99)])) == {two}
    assert set(waiting(world.state, world.now)) == {one, two}


def test_a_server_without_gpus_says_so() -> None:
    world = World(0)
    task = world.submit(None)
    assert world.settle() == []
    assert (world.why(task).code, world.why(task).sentence) == ("NoGpus", "this server has no GPU")
    assert explain(world.state, task, world.now).verdicts == ()


def test_one_pass_is_bounded_and_the_next_goes_on() -> None:
    world = World(1, rules=OPEN)
    tasks = [world.submit(10) for _ in range(MAX_PLACEMENTS + 20)]
    assert len(schedule(world.state, world.now)) == MAX_PLACEMENTS
    world.settle()
    assert all(world.placed(task) for task in tasks)


def test_a_refused_shape_is_worked_out_once_and_told_to_each() -> None:
    world = World(2)
    for _ in range(2):
        world.run(30_000)
    tasks = [world.submit(20_000) for _ in range(50)]
    reasons = waiting(world.state, world.now)
    assert {reasons[task].sentence for task in tasks[1:]} == {"needs 19.5 GiB; most free is 10.2 GiB on GPU 0"}
    assert explain(world.state, tasks[-1], world.now).task == tasks[-1]


# -- a task that is not there yet -----------------------------------------------------------------------------------
def candidate(mib: int, **spec: object) -> Task:
    full = TaskSpec(command=("x",), directory="/", gpu_memory_mib=mib, **spec)  # type: ignore[arg-type]
    estimate = Estimate(footprint_mib=mib, upper_mib=mib, source="declared")
    return Task(id=TaskId(0), owner=ALICE, spec=full, submitted_at=0.0, status=Queued(0.0), estimate=estimate)


def test_a_task_can_be_tried_out_without_being_submitted() -> None:
    world = World(2)
    world.run(30_000)
    before = len(world.log)
    assert try_now(world.state, candidate(35_000), world.now).placement is not None
    assert try_now(world.state, candidate(45_000), world.now).placement is None
    assert (len(world.log), len(world.state.tasks)) == (before, 1)


def test_a_tried_task_stands_behind_those_of_its_priority_and_before_lower_ones() -> None:
    world = World(1, policy=exclusive.POLICY)
    world.submit(1_000)
    assert try_now(world.state, candidate(1_000), world.now).placement is None
    assert try_now(world.state, candidate(1_000, priority=1), world.now).placement is not None


def test_a_task_too_far_behind_to_be_looked_at_would_not_start() -> None:
    world = World(2, rules=Rules(queue=QueueRules(backfill_depth=1)))
    world.run(30_000)
    world.submit(40_960, gpus=2)
    world.submit(40_000, gpus=2)
    decision = try_now(world.state, candidate(1_000), world.now)
    assert (decision.placement, decision.code) == (None, "Priority")
    assert decision.reason == "2 tasks are before it in the queue"
    assert len(decision.verdicts) == 2


def test_what_an_unknown_task_asks_for() -> None:
    world = World(1)
    task = world.submit(None, exclusive=True)
    asked = ask_of(world.task(task), world.state)
    assert (asked.memory_mib, asked.source, asked.alone) == (5_120, "unknown", True)


@pytest.mark.parametrize(
    ("source", "mib", "asked_mib", "alone"),
    [
        ("trace", 40_448, 40_448, False),
        ("trace", 40_449, 36_864, True),  # a driver keeps up to 512 MiB of a card: it gets 90 % of the largest, alone
        ("declared", 40_960, 40_960, False),
    ],
)
def test_an_estimate_within_512_mib_of_the_largest_gpu_gets_that_gpu_alone(
    source: str, mib: int, asked_mib: int, alone: bool
) -> None:
    world = World([24_576, 40_960])
    asked = ask_of(world.task(world.submit(mib, source=source)), world.state)
    assert (asked.memory_mib, asked.alone) == (asked_mib, alone)
