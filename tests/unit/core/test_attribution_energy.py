"""What the GPUs take idle, what an hour adds up to, and what a restart keeps of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carma.core.machine import step
from carma.core.model.events import GpusSampled, MemoryObserved
from carma.core.model.settings import Gate, Memory, Rules, WarmUp
from carma.core.model.values import Activity, AttemptKey, GpuId, GpuSample, ProcessUse
from carma.core.state import State
from carma.core.telemetry.usage import note
from carma.daemon.state_checkpoint import checkpoint, restore
from carma.testing.builders import World
from tests.unit.core.attribution_world import OPEN, energy, idle_world, spent, taken, track

G0 = GpuId("GPU-0")


def test_a_single_reading_of_an_empty_gpu_counts_until_there_are_five() -> None:
    """The first task on a fresh daemon: one sample came before it (without one no GPU takes a task)."""
    world = World(1, rules=OPEN)
    world.activity[G0] = (0.2, 0.1, 0.1)
    task = world.submit(5_000)
    world.settle()
    world.start(task)
    world.wait(20)
    assert world.state.idle_w == {}, "no mean of five"
    assert energy(world, task) == [pytest.approx(20 * 200 * 0.2)]
    world.end(task)
    world.activity[G0] = (0.05, 0.0, 0.0)  # it idles at 60 W now
    world.wait(6)
    assert world.state.idle_w == {G0: pytest.approx(60.0)}, "the mean takes the place of the single look"
    world.activity[G0] = (0.5, 0.1, 0.1)
    later = world.submit(5_000)
    world.settle()
    world.start(later)
    world.wait(1)
    assert spent(world, 10, later) == [pytest.approx(10 * (150.0 - 60.0))]


def taken_before_anybody_looked(power: float | None, seconds: int) -> float:
    """What a task is given, on a GPU that it has been on since before the first sample, at 90 W."""
    world = World(1, rules=OPEN)
    world.state.live.clear()  # as after a restart
    world.state.idle_w.clear()
    task = world.submit(5_000)
    start = replace(world._sample(world.state.gpus[G0]), processes=(), energy_j=None, power_w=None)
    world.emit(GpusSampled(world.now + 0.1, (replace(start, at=world.now + 0.1),)))
    world.settle()
    world.start(task)
    key = world.state.active[task]
    for second in range(1, seconds + 1):
        use = ProcessUse(pid=1, memory_mib=5_000, attempt=key)
        world.emit(
            GpusSampled(
                world.now + second,
                (
                    GpuSample(
                        gpu=G0,
                        at=world.now + second,
                        memory_used_mib=5_000,
                        power_w=power,
                        energy_j=90.0 * second,
                        processes=(use,),
                        activity=Activity(sm_active=0.2),
                    ),
                ),
            )
        )
    return energy(world, task)[0]


@pytest.mark.parametrize("seconds", [3, 20])
def test_while_a_gpu_was_never_seen_empty_half_of_the_lowest_power_counts_as_idle(seconds: int) -> None:
    assert taken_before_anybody_looked(90.0, seconds) == pytest.approx(45.0 * (seconds - 1))
    assert taken_before_anybody_looked(None, seconds) == pytest.approx(45.0 * (seconds - 1)), "by the counter alone"


def test_a_lagging_counter_is_no_reading_of_an_empty_gpu() -> None:
    world = World(1, rules=OPEN)
    world.state.live.clear()
    for second, counter_j in ((1, 0.0), (2, 0.0), (3, 110.0)):  # nothing in one second, then that of two
        sample = GpuSample(gpu=G0, at=world.now + second, memory_used_mib=0, energy_j=counter_j, processes=())
        world.emit(GpusSampled(world.now + second, (sample,)))
    assert world.state.live[G0].empty_w is None


def test_an_unobserved_span_is_attributed_to_no_task() -> None:
    world = idle_world()
    task = world.run(5_000)
    taken(world)
    before = energy(world, task)
    world.now += 3_600
    world.sample()
    assert energy(world, task) == before
    assert taken(world) == ()


@pytest.mark.parametrize("counter_j", [-1.0, float("nan"), float("inf"), None])
def test_a_counter_that_goes_back_or_is_no_number_is_left_out(counter_j: float | None) -> None:
    world = idle_world()
    task = world.run(5_000)
    before = energy(world, task)
    world.now += 1
    sample = world._sample(world.state.gpus[G0])
    world.emit(GpusSampled(world.now, (replace(sample, energy_j=counter_j),)))
    assert energy(world, task) == before


def test_an_hour_of_a_gpu_adds_up() -> None:
    world = idle_world()
    taken(world)
    first = world.run(5_000)
    world.run(5_000)
    rows = taken(world)
    assert {row.hour for row in rows} == {0}
    (row,) = rows
    assert (row.watched_s, row.held_s) == (14.0, 14.0)
    assert row.shared_s == 7.0
    assert row.sm_s == pytest.approx(14 * 0.3)
    assert row.idle_j == pytest.approx(14 * 50.0)
    assert row.tasks_j == pytest.approx(14 * 60.0)
    assert row.energy_j == pytest.approx(14 * 110.0)
    world.end(first)
    world.wait(3)
    assert note(world.state).gpus  # which the disk did not take
    world.wait(1)
    (again,) = taken(world)
    assert again.watched_s == 4.0
    assert taken(world) == ()


def test_an_hour_ends_with_the_hour() -> None:
    world = idle_world()
    taken(world)
    world.now = 3_599.0
    world.sample()
    world.wait(2)
    assert [(row.hour, row.watched_s) for row in taken(world)] == [(1, 2.0)]


def test_energy_and_activity_survive_a_restart_through_the_log_and_through_a_checkpoint() -> None:
    world = idle_world()
    world.activity[G0] = (0.5, 0.2, 0.3)
    task = world.run(5_000)
    for _ in range(20):
        world.wait(30)
        world.settle()
    assert len([event for event in world.log if isinstance(event, MemoryObserved)]) == 1, "only growth is news"
    world.emit(note(world.state))
    again = State(OPEN, world.state.policy)
    for event in world.log:
        step(again, event)
    saved, _ = checkpoint(world.state, 0)
    for state in (again, restore(OPEN, world.state.policy, saved)):
        found = state.tracks[state.active[task]]
        assert (found.energy_j, found.used_s) == (track(world, task).energy_j, track(world, task).used_s)
        assert state.tasks[task].attempts[-1].settled
        assert found.activity is not None
        assert found.activity.sm_active == pytest.approx(0.5)
        assert state.idle_w == {G0: pytest.approx(50.0)}


ACTIVE = st.floats(0.0, 1.0)
MOVE = st.tuples(st.sampled_from(["come", "end", "pause", "foreign"]), ACTIVE, st.integers(1, 9))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(moves=st.lists(MOVE, min_size=1, max_size=25))
def test_nothing_is_given_out_twice(moves: list[tuple[str, float, int]]) -> None:
    """The tasks' energy and the idle GPUs' together are never more than the GPUs took."""
    world = World(2, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=3.0), memory=Memory(margin_mib=0)))
    ended_j = 0.0
    last: dict[AttemptKey, float] = {}
    for what, active, seconds in moves:
        world.activity[GpuId(f"GPU-{seconds % 2}")] = (active, active / 2, active / 3)
        if what == "come":
            world.submit(6_000)
            world.settle()
            world.start(mib=seconds * 1_000)
        elif what == "end" and world.state.active:
            task = min(world.state.active)
            ended_j += track(world, task).energy_j or 0.0
            world.end(task)
            world.settle()
        elif what == "foreign":
            world.foreign[G0] = 1_000 * seconds
        world.wait(seconds)
        last = {key: one.energy_j or 0.0 for key, one in world.state.tracks.items()}
    rows = world.state.usage.values()
    tasks_j, idle_j = sum(row.tasks_j for row in rows), sum(row.idle_j for row in rows)
    assert ended_j + sum(last.values()) == pytest.approx(tasks_j, abs=1e-6)
    assert tasks_j + idle_j <= sum(row.energy_j for row in rows) + 1e-6
    assert all(joules >= 0.0 for joules in last.values())
    guesses = [seen.own for one in world.state.tracks.values() for seen in one.on.values()]
    assert all(own.pressure >= 0.0 and own.variance > 0.0 for own in guesses)
