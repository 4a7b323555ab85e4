"""Backfill without starvation: which tasks may overtake, which GPUs are reserved for the first task, and until when."""

from __future__ import annotations

import pytest

from carma.core.model.events import GpuDrained, TaskPlaced
from carma.core.model.settings import Gate, PlacementRules, QueueRules, Rules, WarmUp
from carma.core.model.values import GpuId, TaskId
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.reservation import reserve
from carma.core.scheduling.snapshot import views
from carma.core.scheduling.verdicts import candidate_of
from carma.testing.builders import World

BARE = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))


def test_the_reserved_start_is_computed_and_shown() -> None:
    world = World(2, rules=BARE)
    world.run(30_000, time_limit_s=600.0)
    world.run(30_000, time_limit_s=100.0)
    head = world.submit(20_000)
    world.settle()
    why = world.why(head)
    started = world.task(TaskId(2)).attempts[-1].started_at
    assert started is not None
    assert why.reserved_start_at == started + 100.0
    assert why.sentence == "needs 19.5 GiB; most free is 10.2 GiB on GPU 0; should start in 01:18"


def test_a_start_that_rests_on_the_assumed_run_time_says_so() -> None:
    world = World(1, rules=BARE)
    world.run(30_000)
    head, small = world.submit(39_000), world.submit(9_000)
    world.settle()
    assumption = "if task 1 takes 01:00:00: it has no time limit (--time)"
    for reason in (world.why(head).sentence, explain(world.state, head, world.now).reason):
        assert reason.endswith(f"; should start in about 59:38, {assumption}")
    assert world.why(head).reserved_start_at is None, "an assumption is not a known time"
    refusal = world.refusal(small, 0)
    assert refusal is not None
    assert refusal.sentence == f"is reserved for task 2, which should start in about 59:38, {assumption}"


@pytest.mark.parametrize(
    ("spec", "late"),
    [
        ({}, "task 1 has run longer than the assumed 01:00:00 and has no time limit (--time)"),
        ({"runtime_s": 600.0}, "task 1 has run longer than estimated"),
    ],
)
def test_no_start_is_named_once_the_expected_time_is_over(spec: dict[str, float], late: str) -> None:
    world = World(1, rules=BARE)
    world.run(30_000, **spec)  # type: ignore[arg-type]
    head = world.submit(20_000)
    world.wait(4.5 * 3600, every_s=600.0)
    world.settle()
    why = world.why(head)
    assert why.sentence.endswith(f"; has no known start: {late}")
    assert why.reserved_start_at is None
    assert explain(world.state, head, world.now).reason.endswith(late)


def test_a_start_is_known_when_a_time_limit_or_a_shorter_task_decides_it() -> None:
    world = World(2, rules=BARE)
    world.run(30_000)
    world.run(30_000, time_limit_s=600.0, runtime_s=60.0)
    head = world.submit(20_000)
    started_at = world.task(TaskId(2)).attempts[-1].started_at
    assert started_at is not None
    assert world.why(head).reserved_start_at == started_at + 60.0


def test_a_gang_starts_when_the_last_of_its_gpus_is_free() -> None:
    world = World(3, rules=BARE)
    for limit_s in (1_000.0, 300.0, 500.0):
        world.run(30_000, time_limit_s=limit_s)
    head = world.submit(20_000, gpus=2)
    world.settle()
    started = world.task(TaskId(3)).attempts[-1].started_at
    assert started is not None
    assert world.why(head).reserved_start_at == started + 500.0
    assert world.why(head).sentence.startswith("needs 2 GPUs; 0 of 3 can take it now; needs 19.5 GiB; most free")


@pytest.mark.parametrize(
    ("why", "mib", "spec", "goes"),
    [
        ("one that is gone by the reserved start goes before", 9_000, {"time_limit_s": 60.0}, True),
        ("one that is still there then does not", 9_000, {"time_limit_s": 6_000.0}, False),
        ("unless the head still fits beside it", 1_000, {"time_limit_s": 6_000.0}, True),
        ("a run time that was measured before counts too", 9_000, {"runtime_s": 50.0}, True),
        ("without any figure an hour is assumed", 9_000, {}, False),
    ],
)
def test_small_tasks_overtake_without_delaying_the_reserved_start(
    why: str, mib: int, spec: dict[str, float], goes: bool
) -> None:
    world = World(1, rules=BARE)
    world.run(30_000, time_limit_s=600.0)
    head = world.submit(39_000)
    small = world.submit(mib, **spec)  # type: ignore[arg-type]
    world.settle()
    assert not world.placed(head)
    assert world.placed(small) is goes, why
    if not goes:
        refusal = world.refusal(small, 0)
        assert refusal is not None
        assert refusal.sentence == "is reserved for task 2, which should start in 09:38"


def test_a_newcomer_that_would_not_have_settled_by_the_start_delays_it() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False)))
    world.run(30_000, time_limit_s=60.0)
    head = world.submit(30_000)
    world.wait(30)
    small = world.submit(None)
    world.settle()
    assert not world.placed(head)
    assert not world.placed(small), "the GPU would be closed for its sake when the head's time comes"


def test_other_gpus_are_free_for_all() -> None:
    world = World(2, rules=BARE)
    world.run(30_000, time_limit_s=60.0)
    world.run(30_000, time_limit_s=600.0)
    head = world.submit(35_000)
    small = world.submit(9_000)
    world.settle()
    assert world.why(head).reserved_start_at is not None
    assert world.gpus_of(small) == (1,), "task 1 ends first, so GPU 0 is the one that is kept"


def degree_of(world: World, head: TaskId, overtaken: int) -> tuple[int, list[str]]:
    rules = world.state.rules
    seen = [candidate_of(view, rules, world.state.policy) for view in views(world.state, world.now)]
    reservation = reserve(ask_of(world.task(head), world.state), seen, rules, world.state.policy, overtaken, world.now)
    return reservation.degree, sorted(reservation.gpus)


@pytest.mark.parametrize(
    ("overtaken", "degree", "gpus"), [(0, 1, 1), (19, 1, 1), (20, 2, 1), (39, 2, 1), (40, 3, 3), (400, 3, 3)]
)
def test_the_three_degrees(overtaken: int, degree: int, gpus: int) -> None:
    world = World([40_960, 40_960, 40_960, 16_384], rules=BARE)
    for _ in range(3):
        world.run(30_000)
    head = world.submit(20_000)
    found, kept = degree_of(world, head, overtaken)
    assert (found, len(kept)) == (degree, gpus)
    assert "GPU-3" not in kept, "which could never hold it"


def test_no_overtaking_at_all_when_the_setting_says_so() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False), queue=QueueRules(overtakes=0)))
    world.run(30_000, time_limit_s=600.0)
    world.submit(39_000)
    small = world.submit(100, time_limit_s=1.0)
    world.settle()
    assert not world.placed(small)


def test_an_overtaking_is_counted_and_forgotten_when_the_head_has_started() -> None:
    world = World(1, rules=BARE)
    first = world.run(30_000, time_limit_s=600.0)
    head = world.submit(39_000)
    small = world.submit(100, time_limit_s=5.0)
    world.settle()
    assert world.state.overtaken == {head: 1}
    assert next(e for e in world.log if isinstance(e, TaskPlaced) and e.key.task == small).overtook == head
    for task in (first, small):
        world.end(task)
    world.settle()
    assert world.placed(head)
    assert world.state.overtaken == {}


def test_a_task_on_a_gpu_that_the_head_could_never_use_overtakes_nobody() -> None:
    world = World([40_960, 8_192], rules=BARE)
    world.run(30_000)
    head = world.submit(39_000)
    for _ in range(3):
        world.submit(2_000)
    world.settle()
    assert world.state.overtaken.get(head, 0) == 0
    assert [gpus for _, gpus in world.placements()[1:]] == [(1,)] * 3


def test_a_head_that_no_gpu_can_take_as_things_stand_blocks_nobody() -> None:
    world = World(2, rules=BARE)
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "broken"))
    head = world.submit(1_000, gpus=2)
    small = world.submit(1_000)
    world.settle()
    assert not world.placed(head)
    assert world.placed(small)
    assert world.why(head).reserved_start_at is None


def test_the_last_place_on_a_gpu_is_kept_as_its_memory_is() -> None:
    rules = Rules(gate=BARE.gate, warmup=BARE.warmup, placement=PlacementRules(tasks_per_gpu=2))
    world = World(2, rules=rules)
    world.run(5_000, time_limit_s=90_000.0)
    world.run(40_000, time_limit_s=600.0)
    gang = world.submit(10_000, gpus=2)
    small = world.submit(1_000, time_limit_s=9_000.0)
    world.settle()
    assert world.why(gang).reserved_start_at is not None
    assert not world.placed(small), "there is memory for both on GPU 0, and a place for one"


def test_a_gang_keeps_its_gpus_while_one_of_them_waits_for_its_next_sample() -> None:
    world = World(2, rules=BARE)
    world.no_processes.update(world.state.gpus)
    first = world.run(30_000, time_limit_s=900.0)
    gang = world.submit(35_000, gpus=2)
    small = world.submit(9_000, time_limit_s=9_000.0)
    world.settle()
    world.end(first)
    world.settle()
    assert not world.placed(small), "what task 1 held is not known to be free, but the gang's turn is not over"
    world.wait(1)
    world.settle()
    assert world.placed(gang)


def stream(world: World, head: TaskId, *, rounds: int, mib: int, limit_s: float | None, lasts: int) -> int:
    """Number of tasks of an endless stream that start before the head; each of them ends after some rounds."""
    ends: list[tuple[int, TaskId]] = []
    for turn in range(rounds):
        for due, task in [entry for entry in ends if entry[0] <= turn]:
            ends.remove((due, task))
            world.end(task)
            world.settle()  # at once, before any sample has seen that it is gone
        for _ in range(3):
            world.submit(mib, time_limit_s=limit_s)
        world.settle()
        if world.placed(head):
            return sum(1 for task, _ in world.placements() if task > head)
        for task in list(world.state.active):
            if world.task(task).attempts[-1].pid is None:
                world.start(task)
                ends.append((turn + lasts, task))
        world.wait(2)
        world.settle()
    raise AssertionError(f"starved: {world.why(head)}")


@pytest.mark.parametrize("limit_s", [None, 1.0, 40.0, 100_000.0])
@pytest.mark.parametrize("processes", [True, False], ids=["process list", "no process list"])
@pytest.mark.parametrize("alone", [True, False])
def test_problem_16_a_large_task_is_never_starved_and_never_stops_the_rest(
    limit_s: float | None, processes: bool, alone: bool
) -> None:
    rules = Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=4.0, idle_s=4.0), queue=QueueRules(overtakes=5))
    world = World(2, rules=rules)
    if not processes:
        world.no_processes.update(world.state.gpus)
    for _ in range(4):
        world.submit(9_000)
    world.settle()
    head = world.submit(39_000, exclusive=alone)
    first = [task for task in world.state.tasks if task != head]
    world.start()
    world.wait(6)
    world.settle()
    world.start(*[task for task in world.state.active if world.task(task).attempts[-1].pid is None])
    for task in first:
        if world.placed(task):
            world.end(task)
    overtook = stream(world, head, rounds=300, mib=9_000, limit_s=limit_s, lasts=4)
    assert overtook <= 2 * 5 + 8, "the bound, and what one pass may start before it is looked at again"


def test_a_gang_is_never_starved() -> None:
    rules = Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=4.0), queue=QueueRules(overtakes=5))
    world = World(4, rules=rules)
    world.run(9_000)
    for task in list(world.state.active):
        world.stop(task)
    gang = world.submit(35_000, gpus=4)
    first = next(iter(world.state.active))
    small = [world.submit(9_000, time_limit_s=60.0) for _ in range(6)]
    world.settle()
    assert any(world.placed(task) for task in small), "it does not stop the rest at once"
    world.end(first)
    for task in list(world.state.active):
        if world.task(task).attempts[-1].pid is None:
            world.start(task)
    world.settle()
    ends = list(world.state.active)
    for task in ends:
        world.wait(1)
        if world.placed(task):
            world.end(task)
        world.settle()
    stream(world, gang, rounds=300, mib=9_000, limit_s=50_000.0, lasts=5)


def test_the_depth_bounds_how_far_behind_the_head_is_looked() -> None:
    world = World(2, rules=Rules(gate=Gate(enabled=False), queue=QueueRules(backfill_depth=3)))
    world.run(30_000)
    world.run(30_000)
    for place in range(4):
        world.submit(39_000 + place)
    small = world.submit(100, time_limit_s=1.0)
    world.settle()
    assert not world.placed(small)
    assert waiting(world.state, world.now)[small].code == "Priority"


def test_a_reserved_start_counts_the_warm_up() -> None:
    world = World(1)
    first = world.submit(None)
    world.settle()
    world.start(first)
    head = world.submit(5_000)
    world.wait(1)
    world.settle()
    assert world.why(head).reserved_start_at == world.now + 20.0


def test_a_reserved_start_beside_a_newcomer_is_when_that_one_should_have_settled() -> None:
    world = World(1)
    first = world.submit(None)
    world.settle()
    head = world.submit(5_000)
    assert world.why(head).reserved_start_at == world.now + 120.0  # not started: it is unknown when it will use the GPU
    world.start(first)
    started_at = world.now
    key = world.state.active[first]
    held = world.memory.pop(key)
    world.wait(50)
    assert world.why(head).reserved_start_at == started_at + 120.0  # `idle_s` from its start, should it never use it
    world.memory[key] = held
    world.wait(1)
    used_at = world.now
    world.wait(10)
    assert world.why(head).reserved_start_at == used_at + 20.0
    world.memory[key] += 200
    world.wait(1)
    grown_at = world.now
    world.wait(5)
    assert world.why(head).reserved_start_at == grown_at + 20.0
    assert world.why(head).sentence.endswith("it must stay steady for 20 s, 15 s to go; should start in 15 s")


def test_a_newcomer_that_should_be_gone_before_it_settles_is_not_waited_for() -> None:
    world = World(1)
    first = world.submit(None, time_limit_s=30.0)
    world.settle()
    world.start(first, mib=0)
    head = world.submit(5_000)
    world.wait(1)
    assert world.why(head).reserved_start_at == world.now + 29.0


def test_a_gpu_that_only_lacks_samples_is_not_taken_for_busy_for_an_hour() -> None:
    world = World(1, rules=Rules(placement=PlacementRules(tasks_per_gpu=3)))
    first = world.run(5_000)
    world.run(5_000)
    world.end(first)
    world.settle()
    head = world.submit(5_000)
    world.settle()
    assert world.why(head).code == "Metrics"
    assert world.why(head).reserved_start_at == world.now + 15.0
