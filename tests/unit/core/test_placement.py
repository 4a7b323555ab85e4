"""The filters: every reason against a GPU, with its numbers, and what passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from carma.core.model.events import GpuDrained, GpuResumed, GpusSampled
from carma.core.model.settings import Gate, Memory, PlacementRules, Rules
from carma.core.model.values import AttemptKey, GpuId, GpuSample, ProcessUse
from carma.core.policies import exclusive
from carma.core.telemetry.window import METRICS
from carma.testing.builders import World

G0 = GpuId("GPU-0")
Activity = tuple[float | None, float | None, float | None]


def shared(activity: Activity, gate: Gate) -> str | None:
    """One GPU with a settled task that keeps it so busy: the code of the refusal to a second one."""
    world = World(1, rules=Rules(gate=gate))
    world.activity[G0] = activity
    world.run(5_000)
    world.wait(30)
    refusal = world.refusal(world.submit(1_000), 0)
    return refusal.code if refusal is not None else None


PUBLISHED = Gate(combine="published")


@pytest.mark.parametrize(
    ("why", "activity", "gate", "code"),
    [
        ("a quiet GPU is shared", (0.3, 0.1, 0.1), Gate(), None),
        ("each cap alone closes it: SM activity", (0.80, 0.1, 0.1), Gate(), "Utilisation"),
        ("each cap alone closes it: occupancy", (0.3, 0.45, 0.1), Gate(), "Utilisation"),
        ("each cap alone closes it: DRAM", (0.3, 0.1, 0.40), Gate(), "Utilisation"),
        ("just below every cap it is open", (0.799, 0.449, 0.399), Gate(), None),
        ("problem 12: all SMs busy, the other two just below", (1.0, 0.44, 0.39), Gate(), "Utilisation"),
        ("problem 12: DRAM all but full, SM activity just below", (0.79, 0.1, 0.95), Gate(), "Utilisation"),
        ("as published, the first of them passes", (1.0, 0.44, 0.39), PUBLISHED, None),
        ("as published, the second of them passes", (0.79, 0.1, 0.95), PUBLISHED, None),
        ("as published, SM activity and occupancy close it", (0.8, 0.45, 0.1), PUBLISHED, "Utilisation"),
        ("as published, SM activity and DRAM close it", (0.8, 0.1, 0.40), PUBLISHED, "Utilisation"),
        ("as published, occupancy and DRAM alone do not", (0.7, 0.9, 0.9), PUBLISHED, None),
        ("a gate that is off lets all through", (1.0, 1.0, 1.0), Gate(enabled=False), None),
        ("a gate that is off does not miss a metric", (None, None, None), Gate(enabled=False), None),
    ],
)
def test_the_utilisation_gate(why: str, activity: Activity, gate: Gate, code: str | None) -> None:
    assert shared(activity, gate) == code, why


@pytest.mark.parametrize("combine", ["any", "published"])
@pytest.mark.parametrize("absent", [None, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_problem_11_a_missing_metric_never_passes(place: int, absent: float | None, combine: str) -> None:
    activity: list[float | None] = [0.1, 0.1, 0.1]
    activity[place] = absent
    gate = Gate(combine=combine)  # type: ignore[arg-type]
    assert shared((activity[0], activity[1], activity[2]), gate) == "Metrics"


def test_the_refusal_names_what_is_missing_and_what_is_too_busy() -> None:
    world = World(1)
    world.activity[G0] = (0.9, 0.1, 0.5)
    world.run(5_000)
    task = world.submit(1_000)
    world.wait(30)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.sentence == "is too busy: sm_active 0.90 (cap 0.80), dram_active 0.50 (cap 0.40)"
    world.activity[G0] = (0.1, None, 0.1)
    world.wait(1)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert "sm_occupancy" in refusal.sentence
    assert METRICS[0] not in refusal.sentence


def test_a_metric_that_came_back_for_one_sample_is_not_judged_on_it() -> None:
    world = World(1)
    world.activity[G0] = (0.1, 0.1, None)
    world.run(5_000)
    world.activity[G0] = (0.1, 0.1, 0.1)
    world.wait(1)
    task = world.submit(1_000)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.code == "Metrics"
    world.wait(2)
    assert world.refusal(task, 0) is None


@pytest.mark.parametrize(("summary", "code"), [("p95", "Utilisation"), ("mean", None), ("risk", None)])
def test_the_window_is_summarised_as_the_settings_say(summary: str, code: str | None) -> None:
    """Bursts to 100 % every tenth second: the 95th percentile sees them, mean and risk weigh them down."""
    world = World(1, rules=Rules(gate=Gate(summary=summary)))  # type: ignore[arg-type]
    world.run(5_000)
    for second in range(40):
        world.activity[G0] = (1.0 if second % 10 == 0 else 0.2, 0.1, 0.1)
        world.wait(1)
    refusal = world.refusal(world.submit(1_000), 0)
    assert (refusal.code if refusal is not None else None) == code


def test_a_gpu_is_judged_when_it_was_sampled_often_enough_since_a_task_left() -> None:
    world = World(1)
    first, second = world.run(5_000), world.run(5_000)
    world.end(first)
    world.settle()
    task = world.submit(1_000)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.sentence == "its activity is not known yet: 0 of 3 samples since a task came or left"
    world.wait(3)
    world.settle()
    assert world.placed(task)
    assert world.placed(second)


def test_an_idle_gpu_is_not_judged() -> None:
    world = World(1)
    world.activity[G0] = (None, None, None)
    world.wait(1)
    task = world.submit(1_000)
    world.settle()
    assert world.placed(task)


# -- who may be where ------------------------------------------------------------------------------------------------
def test_problem_12_there_is_a_limit_on_tasks_per_gpu() -> None:
    world = World(1, rules=Rules(placement=PlacementRules(tasks_per_gpu=2)))
    for _ in range(2):
        world.run(1_000)
    task = world.submit(1_000)
    world.settle()
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == ("TasksPerGpu", "has 2 tasks; the limit is 2")


def test_an_exclusive_task_waits_for_an_empty_gpu_and_keeps_it_empty() -> None:
    world = World(1)
    first = world.run(1_000)
    alone = world.submit(1_000, exclusive=True)
    world.settle()
    refusal = world.refusal(alone, 0)
    assert refusal is not None
    assert refusal.sentence == "the task wants a GPU alone; task 1 is on it"
    world.end(first)
    world.settle()
    world.settle()
    assert world.placed(alone)
    world.start(alone)
    world.wait(30)
    late = world.submit(1_000)
    world.settle()
    refusal = world.refusal(late, 0)
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == ("Exclusive", "task 2 has it alone")


def test_the_exclusive_policy_never_shares() -> None:
    world = World(2, policy=exclusive.POLICY)
    tasks = [world.submit(1_000) for _ in range(3)]
    world.settle()
    assert world.placements() == [(1, (0,)), (2, (1,))]
    world.start()
    world.wait(60)
    world.settle()
    assert not world.placed(tasks[2])
    assert world.why(tasks[2]).code == "Exclusive"


def test_a_drained_gpu_takes_no_new_task_and_leaves_the_running_ones() -> None:
    world = World(2)
    running = world.run(1_000)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "new fan"))
    task = world.submit(40_960)
    world.settle()
    refusal = world.refusal(task, 1)
    assert refusal is not None
    assert refusal.sentence == "is drained: new fan"
    assert world.placed(running)
    world.emit(GpuResumed(world.now, GpuId("GPU-1")))
    world.settle()
    assert world.gpus_of(task) == (1,)


def test_a_drained_server_takes_no_new_task() -> None:
    world = World(2)
    world.emit(GpuDrained(world.now, None))
    task = world.submit(1_000)
    world.settle()
    assert [world.refusal(task, index) is None for index in range(2)] == [False, False]
    assert world.why(task).code == "Drained"
    world.emit(GpuResumed(world.now, None))
    world.settle()
    assert world.placed(task)


def test_a_gpus_own_drain_and_the_servers_are_each_lifted_by_itself() -> None:
    world = World(2)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "new fan"))
    world.emit(GpuDrained(world.now, None, "maintenance"))
    assert [world.view(index).drained for index in range(2)] == ["maintenance", "new fan"]
    world.emit(GpuResumed(world.now, None))
    assert [world.view(index).drained for index in range(2)] == [None, "new fan"]
    world.emit(GpuDrained(world.now, None))
    world.emit(GpuResumed(world.now, GpuId("GPU-1")))
    assert [world.view(index).drained for index in range(2)] == ["", ""]


def test_a_faulty_gpu_is_passed_over_until_it_is_well() -> None:
    world = World(2)
    world.faults[G0] = "fell off the bus"
    world.wait(1)
    first, second = world.submit(30_000), world.submit(30_000)
    world.settle()
    assert world.gpus_of(first) == (1,)
    refusal = world.refusal(second, 0)
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == ("Fault", "cannot be used: fell off the bus")
    del world.faults[G0]
    world.wait(1)
    world.settle()
    assert world.gpus_of(second) == (0,)


@pytest.mark.parametrize("allowed", [("1",), ("GPU-1",)])
def test_only_listed_gpus_take_tasks(allowed: tuple[str, ...]) -> None:
    world = World(3, rules=Rules(placement=PlacementRules(gpus=allowed)))
    tasks = [world.submit(30_000) for _ in range(2)]
    world.settle()
    assert world.placements() == [(1, (1,))]
    refusal = world.refusal(tasks[1], 0)
    assert refusal is not None
    assert refusal.code == "NotListed"


def test_the_margin_is_kept_on_a_shared_gpu_and_not_on_an_empty_one() -> None:
    world = World(1, rules=Rules(memory=Memory(margin_mib=512)))
    world.run(40_960 - 2_000)
    task = world.submit(1_489)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.sentence == ("needs 1,489 MiB; has room for 1,488 MiB of 40.0 GiB (38.0 GiB booked, 512 MiB margin)")
    assert world.refusal(world.submit(1_488), 0) is None
    empty = World(1)
    whole = empty.submit(40_960)
    empty.settle()
    assert empty.placed(whole)


def test_the_process_of_another_attempt_does_not_settle_this_one() -> None:
    world = World(1)
    task = world.submit(5_000)
    world.settle()
    key = world.state.active[task]
    world.start(task)
    del world.memory[key]
    stranger = ProcessUse(pid=9, memory_mib=3_000, attempt=AttemptKey(key.task, 7))
    for _ in range(30):
        world.now += 1
        seen = GpuSample(gpu=G0, at=world.now, memory_used_mib=3_000, processes=(stranger,))
        world.emit(GpusSampled(world.now, (seen,)))
    assert "has not used the GPU yet" in str(world.view(0).holders[0].warming)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda world: world.faults.update({G0: "gone"}),
        lambda world: world.emit(GpuDrained(world.now, G0, "x")),
        lambda world: world.foreign.update({G0: 39_000}),
    ],
)
def test_an_attempt_that_runs_stays_whatever_becomes_of_its_gpu(spoil: Callable[[World], object]) -> None:
    world = World(1)
    task = world.run(5_000)
    spoil(world)
    world.wait(5)
    world.settle()
    assert world.placed(task)
