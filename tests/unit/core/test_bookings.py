"""Bookings, not only free memory: what a GPU has room for, and what is unknown or not ours."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from carma.core.model.events import GpusSampled
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import Activity, AttemptKey, GpuId, GpuSample, ProcessUse, TaskId
from carma.core.scheduling.gpu_view import Holder, room_mib
from carma.testing.builders import World

G0 = GpuId("GPU-0")


def holder(booking: int, observed: int | None = None, peak: int | None = None) -> Holder:
    key = AttemptKey(TaskId(1), 1)
    return Holder(key=key, booking_mib=booking, observed_mib=observed, peak_mib=peak, ends_at=0.0)


@pytest.mark.parametrize(
    ("why", "used", "foreign", "holders", "room"),
    [
        ("an empty GPU has all its memory", 0, 0, (), 40_000),
        ("a booking counts before the task holds anything", 0, 0, (holder(10_000),), 30_000),
        ("a booking counts while the task holds less", 4_000, 0, (holder(10_000, 4_000, 4_000),), 30_000),
        ("a task that holds its booking counts once", 10_000, 0, (holder(10_000, 10_000, 10_000),), 30_000),
        ("a task above its booking counts with what it holds", 15_000, 0, (holder(10_000, 15_000, 15_000),), 25_000),
        ("a task that shrank may grow to its peak again", 3_000, 0, (holder(10_000, 3_000, 16_000),), 24_000),
        ("foreign memory is not free", 7_000, 7_000, (), 33_000),
        ("foreign memory and a booking add up", 7_000, 7_000, (holder(10_000),), 23_000),
        ("memory of unknown processes is not free", 12_000, 0, (holder(10_000, 10_000, 10_000),), 28_000),
        ("never below zero", 45_000, 5_000, (holder(40_000, 40_000, 40_000),), 0),
    ],
)
def test_the_room_of_a_gpu(why: str, used: int, foreign: int, holders: tuple[Holder, ...], room: int) -> None:
    assert room_mib(40_000, used, foreign, holders) == room, why


def test_memory_in_use_that_is_not_known_is_no_room() -> None:
    assert room_mib(40_000, None, 0, ()) is None


def test_problem_10_a_booking_keeps_memory_that_is_still_free() -> None:
    world = World(1)
    world.run(30_000, holds_mib=2_000)
    view = world.view(0)
    assert (view.used_mib, view.booked_mib, view.room_mib) == (2_000, 30_000, 10_960)
    late = world.submit(20_000)
    world.settle()
    assert not world.placed(late)
    assert world.why(late).code == "Memory"


def test_a_task_above_its_booking_is_counted_with_what_it_was_seen_to_hold() -> None:
    world = World(1)
    world.run(5_000, holds_mib=25_000)
    assert world.view(0).room_mib == 40_960 - 25_000
    world.memory[AttemptKey(TaskId(1), 1)] = 1_000
    world.wait(5)
    assert world.view(0).room_mib == 40_960 - 25_000, "it was that large once and may be again"


def test_foreign_processes_are_counted_and_shown_and_do_not_make_a_gpu_unusable() -> None:
    world = World(1)
    world.foreign[G0] = 10_000
    world.wait(5)
    view = world.view(0)
    assert (view.foreign_mib, view.room_mib, view.idle) == (10_000, 30_960, False)
    assert [use.name for use in view.foreign] == ["jupyter"]
    small, large = world.submit(20_000), world.submit(31_000)
    assert world.refusal(large, 0) is not None
    world.settle()
    assert world.placed(small)
    assert not world.placed(large)


def test_a_foreign_process_is_judged_by_the_gate_too() -> None:
    world = World(1)
    world.foreign[G0] = 1_000
    world.activity[G0] = (0.95, 0.2, 0.2)
    world.wait(5)
    task = world.submit(1_000)
    world.settle()
    assert world.why(task).code == "Utilisation"


def test_an_empty_process_list_does_not_make_a_used_gpu_idle() -> None:
    """Problem 11: in a container the process list may be empty while a process holds 30 GB."""
    world = World(1)
    world.now += 1
    hidden = GpuSample(gpu=G0, at=world.now, memory_used_mib=30_000, activity=Activity(sm_active=0.9), processes=())
    world.emit(GpusSampled(world.now, (hidden,)))
    view = world.view(0)
    assert (view.idle, view.foreign_mib, view.room_mib) == (False, 30_000, 10_960)


def test_the_little_that_a_driver_keeps_for_itself_is_not_a_foreign_process() -> None:
    world = World(1)
    world.now += 1
    world.emit(GpusSampled(world.now, (GpuSample(gpu=G0, at=world.now, memory_used_mib=300, processes=()),)))
    view = world.view(0)
    assert (view.idle, view.foreign_mib, view.room_mib) == (True, 0, 40_660)


@pytest.mark.parametrize(("unlisted_mib", "foreign_mib"), [(1_024, 0), (1_025, 1_025)])
def test_memory_beyond_the_listed_processes_is_foreign_from_1025_mib_on(unlisted_mib: int, foreign_mib: int) -> None:
    world = World(1)
    world.run(5_000)
    world.now += 1.0
    (found,) = world.state.gpus.values()
    sample = world._sample(found)
    assert sample.memory_used_mib == 5_000
    world.emit(GpusSampled(world.now, (replace(sample, memory_used_mib=5_000 + unlisted_mib),)))
    assert world.view(0).foreign_mib == foreign_mib


def test_the_memory_of_a_task_that_has_just_ended_is_free_before_the_next_sample() -> None:
    world = World(1)
    first = world.run(30_000)
    world.end(first)
    view = world.view(0)
    assert (view.foreign_mib, view.room_mib, view.idle) == (0, 40_960, True)
    world.settle()
    second = world.submit(40_000)
    world.settle()
    assert world.placed(second)


def test_a_process_that_outlives_its_attempt_is_foreign_from_the_next_sample_on() -> None:
    world = World(1)
    first = world.run(30_000)
    key = world.state.active[first]
    world.end(first)
    world.now += 1
    left = ProcessUse(pid=5, memory_mib=4_000, attempt=key)
    world.emit(GpusSampled(world.now, (GpuSample(gpu=G0, at=world.now, memory_used_mib=4_000, processes=(left,)),)))
    view = world.view(0)
    assert (view.foreign_mib, view.room_mib, view.idle) == (4_000, 36_960, False)


def test_without_a_process_list_a_departure_needs_a_sample_before_memory_is_known() -> None:
    world = World(1, rules=Rules(warmup=WarmUp(idle_s=5.0)))
    world.no_processes.add(G0)
    first = world.run(30_000)
    world.end(first)
    world.settle()
    late = world.submit(20_000)
    world.settle()
    refusal = world.refusal(late, 0)
    assert refusal is not None
    assert (refusal.code, "no sample since a task left" in refusal.sentence) == ("Metrics", True)
    world.wait(1)
    world.settle()
    assert world.placed(late)


@pytest.mark.parametrize("missing", ["memory", "stale", "never sampled"])
def test_problem_11_what_is_not_known_is_no_room(missing: str) -> None:
    world = World(1)
    task = world.submit(1_000)
    world.now += 1
    if missing == "memory":
        world.emit(GpusSampled(world.now, (GpuSample(gpu=G0, at=world.now, processes=()),)))
    elif missing == "stale":
        world.now += world.state.rules.window.stale_s + 1
    else:
        world.state.live.clear()
    world.settle()
    assert not world.placed(task)
    refusal = world.refusal(task, 0)
    assert refusal is not None
    assert refusal.code == "Metrics"
    assert "memory is not known" in refusal.sentence


def test_stale_samples_open_nothing_until_a_fresh_one_comes() -> None:
    world = World(1)
    task = world.submit(1_000)
    world.now += 16
    world.settle()
    assert not world.placed(task)
    world.sample()
    world.settle()
    assert world.placed(task)


def test_a_process_with_unknown_memory_is_not_a_process_without_memory() -> None:
    world = World(1, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=2.0)))
    task = world.submit(10_000)
    world.settle()
    world.start(task)
    key = world.state.active[task]
    for _ in range(5):
        world.now += 1
        use = ProcessUse(pid=1, memory_mib=None, attempt=key)
        world.emit(GpusSampled(world.now, (GpuSample(gpu=G0, at=world.now, memory_used_mib=9_000, processes=(use,)),)))
    found = world.view(0).holders[0]
    assert (found.observed_mib, found.peak_mib, found.growth_mib) == (None, None, 10_000)
    assert found.warming is None, "it is on the GPU, so it counts as active"
    assert world.view(0).foreign_mib == 0, "memory that the task may hold does not count as foreign"


def test_a_late_sample_changes_nothing() -> None:
    world = World(1)
    task = world.run(5_000)
    key = world.state.active[task]
    old = ProcessUse(pid=1, memory_mib=39_000, attempt=key)
    late = GpuSample(gpu=G0, at=world.now - 3, memory_used_mib=39_000, processes=(old,), energy_j=math.inf)
    world.emit(GpusSampled(world.now, (late,)))
    assert world.view(0).holders[0].peak_mib == 5_000
