"""Attribution of activity and energy to tasks from samples; nothing is counted twice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.events import GpusSampled
from carma.core.model.settings import Gate, Memory, Rules, WarmUp
from carma.core.model.values import GpuId, GpuSample, ProcessUse, TaskId
from carma.core.telemetry.attribution import weight
from carma.testing.builders import World
from tests.unit.core.attribution_world import OPEN, energy, idle_world, spent, track

G0 = GpuId("GPU-0")


def test_an_attempt_alone_has_all_of_the_activity_and_the_energy_above_idle() -> None:
    world = idle_world()
    world.activity[G0] = (0.5, 0.2, 0.3)
    task = world.run(5_000)
    assert spent(world, 10, task) == [pytest.approx(10 * 200 * 0.5)]
    seen = track(world, task).activity
    assert seen is not None
    assert (seen.sm_active, seen.sm_occupancy, seen.dram_active) == (0.5, 0.2, 0.3)
    assert (seen.gr_active, seen.tensor_active) == (None, None), "not given is not zero"


def weights(world: World, *tasks: TaskId) -> list[float]:
    return [weight(track(world, task).on[G0].own) for task in tasks]


def test_a_new_task_gets_the_decrease_of_idle_time() -> None:
    world = idle_world()
    world.activity[G0] = (0.6, 0.1, 0.1)
    first = world.run(5_000)
    world.wait(120)
    world.activity[G0] = (0.8, 0.1, 0.1)  # 0.4 were idle, now half of that: it would keep half of a GPU busy
    second = world.run(5_000)
    world.wait(120)
    assert weights(world, first, second) == [pytest.approx(0.6, abs=0.05), pytest.approx(0.5, abs=0.05)]
    assert spent(world, 10, first, second) == [
        pytest.approx(1_600 * 6 / 11, rel=0.1),
        pytest.approx(1_600 * 5 / 11, rel=0.1),
    ]


def test_a_slow_down_that_both_suffer_nearly_cancels_out() -> None:
    world = idle_world()
    world.activity[G0] = (0.6, 0.1, 0.1)
    first = world.run(5_000)
    world.wait(120)
    world.activity[G0] = (0.8, 0.1, 0.1)
    second = world.run(5_000)
    world.wait(120)
    one, other = spent(world, 10, first, second)
    world.activity[G0] = (0.6, 0.1, 0.1)
    world.wait(60)
    slow_one, slow_other = spent(world, 10, first, second)
    assert slow_one / slow_other == pytest.approx(one / other, rel=0.25)


def test_what_is_seen_of_it_alone_counts_more_than_what_was_thought() -> None:
    world = idle_world()
    world.activity[G0] = (0.9, 0.1, 0.1)
    first = world.run(5_000)
    world.activity[G0] = (1.0, 0.1, 0.1)  # full: the newcomer cannot show what it does
    second = world.run(5_000)
    world.end(first)
    world.activity[G0] = (0.3, 0.1, 0.1)
    world.wait(20)
    assert weights(world, second) == [pytest.approx(0.3, abs=0.01)]
    world.activity[G0] = (0.8, 0.1, 0.1)  # another phase of its work
    world.wait(20)
    assert weights(world, second) == [pytest.approx(0.8, abs=0.02)]


def test_the_increase_by_a_second_new_task_is_not_attributed_to_the_first() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False)))
    tasks: list[TaskId] = []
    for active in (0.2, 0.5, 0.8):
        world.activity[G0] = (active, 0.1, 0.1)
        task = world.submit(5_000)
        world.settle()
        world.start(task)
        world.wait(120)
        tasks.append(task)
    expected = [0.2, 1 - 0.5 / 0.8, 1 - 0.2 / 0.5]
    assert weights(world, *tasks) == [pytest.approx(value, abs=0.06) for value in expected]


def test_the_share_of_an_idle_task_with_memory_falls_to_zero() -> None:
    world = idle_world()
    world.activity[G0] = (0.8, 0.1, 0.1)
    first = world.run(5_000)
    world.wait(60)
    world.activity[G0] = (0.75, 0.1, 0.1)  # it even slows the other
    second = world.submit(5_000)
    world.settle()
    world.start(second)
    at_first = spent(world, 5, second)[0] / (5 * 150)
    world.wait(1_000)
    one, other = spent(world, 100, first, second)
    assert 0.02 < at_first < 0.4, "of one just come, nothing is not known either"
    assert 0.0 < other / (one + other) < 0.02
    world.end(first)
    world.activity[G0] = (0.4, 0.1, 0.1)  # it begins after all, and that is soon seen
    world.wait(5)
    assert weights(world, second) == [pytest.approx(0.4, abs=0.05)]


def test_tasks_that_start_together_all_get_a_share() -> None:
    """Four in one second hold memory, begin to compute, and leave one by one."""
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False)))
    world.activity[G0] = (0.0, 0.0, 0.0)
    world.wait(6)
    tasks = [world.submit(5_000) for _ in range(4)]
    world.settle()
    world.start()
    world.wait(10)
    for active in (0.3, 0.6, 0.8, 0.9, 0.7, 0.6):
        world.activity[G0] = (active, 0.1, 0.1)
        world.wait(5)
    given_j = energy(world, *tasks)
    assert given_j == [pytest.approx(sum(given_j) / 4)] * 4, "nothing tells them apart"
    world.end(tasks[0])
    world.activity[G0] = (0.65, 0.1, 0.1)
    assert all(joules > 0.2 * sum(given_j) / 4 for joules in spent(world, 30, *tasks[1:]))


def test_growing_memory_shows_which_task_begins() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False)))
    world.activity[G0] = (0.0, 0.0, 0.0)
    first, second = world.submit(5_000), world.submit(5_000)
    world.settle()
    world.start(mib=700)
    world.wait(90)
    world.memory[world.state.active[second]] = 4_000
    world.activity[G0] = (0.5, 0.1, 0.1)
    world.wait(10)
    idle, busy = weights(world, first, second)
    assert busy > 10 * idle


def test_tasks_that_come_and_go_are_given_about_what_is_theirs() -> None:
    """A queue on one GPU: a start-up with memory and no activity, then work, slowed by those beside it."""
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), memory=Memory(margin_mib=0)))
    alone = (0.12, 0.6, 0.3, 0.9, 0.08, 0.45, 0.25, 0.8)
    came_at: dict[TaskId, float] = {}
    true_s: dict[TaskId, float] = {}
    found: dict[TaskId, tuple[float, float]] = {}  # as recorded, as it was
    for second in range(1_200):
        if second % 75 == 0 and len(came_at) < len(alone):
            task = world.submit(5_000)
            world.settle()
            world.start(task)
            came_at[task], true_s[task] = world.now, 0.0
        for task in [one for one in world.state.active if world.now - came_at[one] >= 170 + 20 * (one % 4)]:
            seen = track(world, task).activity
            assert seen is not None
            assert seen.sm_active is not None
            found[task] = (seen.sm_active, true_s[task] / (world.now - came_at[task]))
            world.end(task)
        busy = [task for task in world.state.active if world.now - came_at[task] >= 10]
        asked = sum(alone[task - 1] for task in busy)
        active = min(0.95, asked)  # a full GPU shows no more than that, and slows all alike
        for task in busy:
            true_s[task] += alone[task - 1] * active / asked
        world.activity[G0] = (active, 0.1, 0.1)
        world.wait(1)
    assert len(found) == len(alone)
    assert all(true / 3 < seen < 3 * true for seen, true in found.values()), found
    off = sum(abs(seen - true) for seen, true in found.values()) / sum(true for _, true in found.values())
    assert off < 0.4


def test_unknown_tasks_have_equal_shares() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False)))
    world.wait(6)
    tasks = [world.submit(5_000) for _ in range(3)]
    world.settle()
    world.start()
    assert spent(world, 10, *tasks) == [pytest.approx(200.0)] * 3  # 60 W above idle


def test_a_task_without_memory_has_no_share() -> None:
    world = idle_world()
    first = world.run(5_000)
    second = world.run(5_000, holds_mib=0)
    assert spent(world, 10, first, second) == [pytest.approx(600.0), 0.0]
    assert track(world, second).activity is None
    assert track(world, second).used_s == 0.0


def test_what_the_sampler_tells_of_every_process_is_used() -> None:
    world = idle_world()
    first, second = world.run(5_000), world.run(5_000)
    keys = [world.state.active[task] for task in (first, second)]
    before = energy(world, first, second)
    world.now += 1
    uses = tuple(
        ProcessUse(pid=place, memory_mib=5_000, sm_active=sm, attempt=key)
        for place, (key, sm) in enumerate(zip(keys, (0.1, 0.3), strict=True))
    )
    sample = world._sample(world.state.gpus[G0])
    world.emit(GpusSampled(world.now, (replace(sample, processes=uses),)))
    one, other = (after - then for after, then in zip(energy(world, first, second), before, strict=True))
    assert [one, other] == pytest.approx([15.0, 45.0])


def test_activity_reported_for_one_process_only_is_not_used() -> None:
    world = idle_world()
    first, second = world.run(5_000), world.run(5_000)
    keys = [world.state.active[task] for task in (first, second)]
    before = energy(world, first, second)
    world.now += 1
    uses = tuple(
        ProcessUse(pid=place, memory_mib=5_000, sm_active=sm, attempt=key)
        for place, (key, sm) in enumerate(zip(keys, (0.9, None), strict=True))
    )
    sample = world._sample(world.state.gpus[G0])
    world.emit(GpusSampled(world.now, (replace(sample, processes=uses),)))
    one, _ = (after - then for after, then in zip(energy(world, first, second), before, strict=True))
    weighed, beside = weights(world, first, second)
    assert one == pytest.approx(60.0 * weighed / (weighed + beside))


def test_the_share_of_a_foreign_process_goes_to_no_task() -> None:
    world = idle_world()
    world.foreign[G0] = 2_000
    world.activity[G0] = (0.2, 0.1, 0.1)
    world.wait(60)
    world.activity[G0] = (0.5, 0.1, 0.1)
    task = world.run(5_000)
    world.wait(60)
    own = 1 - 0.5 / 0.8
    assert spent(world, 10, task) == [pytest.approx(10 * 100 * own / (own + 0.2), rel=0.1)]
    assert sum(row.tasks_j + row.idle_j for row in world.state.usage.values()) < sum(
        row.energy_j for row in world.state.usage.values()
    )


def test_foreign_processes_that_return_count_as_new_ones() -> None:
    world = idle_world()
    world.foreign[G0] = 2_000
    world.activity[G0] = (0.9, 0.1, 0.1)
    world.wait(60)
    assert weight(world.state.live_of(G0).background) == pytest.approx(0.9, abs=0.02)
    del world.foreign[G0]
    world.activity[G0] = (0.5, 0.1, 0.1)
    task = world.run(5_000)
    world.wait(60)
    world.foreign[G0] = 2_000  # it holds memory and does nothing
    world.wait(60)
    assert spent(world, 10, task) == [pytest.approx(10 * 100, rel=0.05)]


def test_a_gpu_with_unexplained_memory_is_not_idle() -> None:
    world = World(1, rules=OPEN)
    for _ in range(8):
        world.now += 1
        hidden = GpuSample(gpu=G0, at=world.now, memory_used_mib=9_000, power_w=30.0, energy_j=0.0, processes=())
        world.emit(GpusSampled(world.now, (hidden,)))
    assert G0 not in world.state.idle_w
