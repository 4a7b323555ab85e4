"""The last rung: who is stopped, when, and who is not."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from carma.core.model.commands import StopAttempt
from carma.core.model.events import AttemptStarted, GpusSampled, MemorySampled, StopRequested
from carma.core.model.outcome import Cancelled, Failed, OutOfMemory
from carma.core.model.settings import Gate, Rules, Sharing, WarmUp
from carma.core.model.status import Finished, Recovering
from carma.core.model.values import AttemptKey, Confinement, GpuId, GpuSample, Guard, ProcessUse, TaskId
from carma.core.telemetry.observation import to_watch
from carma.daemon.loop import watch_pause_s
from carma.testing.builders import World

G0 = GpuId("GPU-0")
OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))


def world_of(*bookings: int, rules: Rules = OPEN, memory_mib: int = 20_000) -> tuple[World, list[TaskId]]:
    """Tasks on one GPU; each holds 1,000 MiB so far."""
    world = World(1, rules=rules, memory_mib=memory_mib)
    tasks = [world.submit(mib) for mib in bookings]
    world.settle()
    world.start(mib=1_000)
    world.wait(1)
    world.settle()
    return world, tasks


def holds(world: World, task: TaskId, mib: int) -> None:
    world.memory[world.state.active[task]] = mib


def stopped(world: World) -> list[TaskId]:
    """The attempts that the watchdog stops after the next sample."""
    world.now += 0.2
    world.sample_memory()
    return [event.task for event in world.settle() if isinstance(event, StopRequested)]


def test_a_task_that_takes_memory_booked_by_a_neighbour_is_stopped_at_once_and_the_message_has_the_numbers() -> None:
    world, (grower, calm) = world_of(4_000, 10_000)
    holds(world, grower, 11_000)
    assert stopped(world) == [grower]
    event = next(event for event in world.log if isinstance(event, StopRequested))
    assert event.ending == OutOfMemory(
        "gpu",
        137,
        None,
        11_000,
        "stopped by the watchdog: it held 10.7 GiB on GPU 0 and had booked 3.9 GiB; 7.8 GiB were left, and its "
        "neighbours may still take 8.8 GiB of what they booked",
    )
    assert world.commands[-1] == StopAttempt(AttemptKey(grower, 1), 0.0, 9)
    world.end(grower, Failed(137))
    world.settle()
    attempt = world.task(grower).attempts[-1]
    assert (attempt.outcome, attempt.blame) == (event.ending, "own")
    assert isinstance(world.task(grower).status, Recovering)
    plan = world.task(grower).plan
    assert plan is not None
    assert (plan.rung, plan.memory_mib) == ("larger", 11_000 + 1_024)
    assert world.placed(calm)


def test_a_task_above_its_booking_runs_on_while_there_is_room() -> None:
    world, (grower, _) = world_of(4_000, 10_000)
    holds(world, grower, 9_500)  # 9,500 are left, and 9,000 are to come
    assert stopped(world) == []


def test_exactly_as_much_free_as_neighbours_may_take_and_half_the_margin_is_enough() -> None:
    world, (grower, _) = world_of(4_000, 10_000)
    enough_mib = 9_000 + world.state.rules.memory.margin_mib // 2
    holds(world, grower, 20_000 - 1_000 - enough_mib)
    assert stopped(world) == []
    holds(world, grower, 20_000 - 1_000 - enough_mib + 1)
    assert stopped(world) == [grower]


def test_all_of_ones_booking_may_be_taken() -> None:
    world, tasks = world_of(9_000, 10_400)
    holds(world, tasks[0], 9_000)
    holds(world, tasks[1], 10_400)
    assert stopped(world) == []


def test_growth_within_the_noise_stops_no_task() -> None:
    world, (one, other) = world_of(9_000, 10_400)
    holds(world, one, 9_064)
    holds(world, other, 10_400)
    world.foreign[G0] = 536  # not a MiB is left
    assert stopped(world) == []
    holds(world, one, 9_065)
    world.foreign[G0] = 535
    assert stopped(world) == [one]


def test_neither_foreign_processes_nor_tasks_within_their_bookings_are_stopped() -> None:
    world, _ = world_of(9_000, 10_000)
    world.foreign[G0] = 17_000
    assert stopped(world) == []


def test_the_largest_excess_goes_first_and_only_as_many_as_needed() -> None:
    world, (one, other, calm) = world_of(2_000, 2_000, 12_000)
    holds(world, one, 4_000)
    holds(world, other, 6_000)
    assert stopped(world) == [other], "10,000 are to come; 9,000 were left, and with its 6,000 there are enough"
    assert world.placed(calm)
    assert world.placed(one)


def test_when_one_is_not_enough_the_next_goes_too() -> None:
    world, (one, other, _) = world_of(2_000, 2_000, 14_000)
    holds(world, one, 9_000)
    holds(world, other, 9_900)
    assert stopped(world) == [other, one]


def test_a_stopping_task_is_not_stopped_twice_and_its_memory_counts_as_free() -> None:
    world, (one, other, _) = world_of(2_000, 2_000, 12_000)
    holds(world, one, 4_000)
    holds(world, other, 6_000)
    assert stopped(world) == [other]
    assert stopped(world) == []
    assert stopped(world) == [], "the other one need not go: room is on its way"


def test_the_unused_booking_of_a_stopping_task_does_not_count() -> None:
    world, (grower, leaving, _) = world_of(2_000, 10_000, 6_000)
    world.stop(leaving)
    holds(world, grower, 12_000)  # 6,000 are left, 5,000 of the third are to come
    assert stopped(world) == []


def test_memory_of_a_task_that_ended_since_the_sample_does_not_count() -> None:
    world, (one, other, _) = world_of(2_000, 5_000, 12_000)
    holds(world, one, 2_500)
    holds(world, other, 5_000)
    assert stopped(world) == []
    holds(world, one, 3_000)
    world.now += 0.2
    world.sample_memory()
    world.end(other)
    assert [event for event in world.settle() if isinstance(event, StopRequested)] == []


def test_what_has_not_started_yet_has_all_that_it_booked_to_come() -> None:
    world, (grower,) = world_of(4_000)
    late = world.submit(10_000)
    world.settle()
    assert world.placed(late)
    holds(world, grower, 9_900)
    assert stopped(world) == [grower]


def test_a_task_that_was_above_its_booking_when_a_neighbour_came_may_move_a_little() -> None:
    """The neighbour was placed beside what it held, with the margin; a few MiB more are not its end."""
    world, (first,) = world_of(4_000)
    holds(world, first, 9_000)
    world.wait(1)
    second = world.submit(20_000 - 9_000 - 512)
    world.settle()
    assert world.placed(second)
    holds(world, first, 9_200)
    assert stopped(world) == []
    holds(world, first, 9_257)
    assert stopped(world) == [first]


def test_a_task_alone_on_a_gpu_is_never_stopped() -> None:
    world = World(1, rules=OPEN, memory_mib=20_000)
    task = world.submit(4_000, exclusive=True)
    world.settle()
    world.start(task, mib=19_900)
    assert stopped(world) == []


def test_a_stale_sample_stops_no_task() -> None:
    world, (grower, _) = world_of(4_000, 10_000)
    holds(world, grower, 11_000)
    world.now += 0.2
    world.sample_memory()
    world.now += OPEN.window.stale_s + 1
    assert [event for event in world.settle() if isinstance(event, StopRequested)] == []


def test_the_watchdog_can_be_switched_off() -> None:
    world, (grower, _) = world_of(4_000, 10_000, rules=replace(OPEN, sharing=Sharing(watchdog=False)))
    holds(world, grower, 18_000)
    assert stopped(world) == []
    assert to_watch(world.state) == ()


def test_a_cancellation_replaces_a_stop_by_the_watchdog() -> None:
    world, (grower, _) = world_of(4_000, 10_000)
    holds(world, grower, 11_000)
    assert stopped(world) == [grower]
    world.stop(grower)
    world.end(grower, Failed(137))
    world.settle()
    assert world.task(grower).status == Finished(world.now, Cancelled("alice"))


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_a_neighbour_that_fails_meanwhile_has_no_blame_in_either_order_of_the_ends(noticed: str) -> None:
    world, (grower, calm) = world_of(4_000, 10_000)
    holds(world, grower, 15_000)
    assert stopped(world) == [grower]
    if noticed == "after":
        world.end(grower, Failed(137))
        world.now += 0.5
    world.oom(calm, asked_mib=1_000, peak_mib=4_000)
    attempt = world.task(calm).attempts[-1]
    assert attempt.blame == "neighbour", "only a memory sample saw what the grower held"


# What is looked at often.


def guarded(world: World, task: TaskId, *guards: Guard) -> None:
    key = world.state.active[task]
    world.emit(AttemptStarted(world.now, key, 1, Confinement(mechanism="mps", guards=guards)))


def test_gpus_are_watched_while_no_limit_holds_their_tasks() -> None:
    world = World(2, rules=OPEN, memory_mib=20_000)
    world.submit(4_000)
    world.settle()
    assert to_watch(world.state) == (), "it is alone there"
    for _ in range(3):
        world.submit(4_000)
    world.settle()
    assert to_watch(world.state) != ()
    watchdog, limit = Guard(rung="watchdog", limit_mib=4_000), Guard(rung="mps", limit_mib=4_000)
    for task in tuple(world.state.active)[:-1]:
        guarded(world, task, limit, watchdog)
    assert len(to_watch(world.state)) == 1
    guarded(world, tuple(world.state.active)[-1], watchdog)
    assert len(to_watch(world.state)) == 1, "the watchdog cannot be relied on without samples"


def test_memory_samples_are_rare_without_tasks_to_watch() -> None:
    world = World(1, rules=OPEN, memory_mib=20_000)
    world.submit(4_000)
    world.settle()
    assert watch_pause_s(world.state) == 1.0
    world.submit(4_000)
    world.settle()
    assert watch_pause_s(world.state) == world.state.rules.sharing.watch_s < 1.0


def test_limits_that_add_up_to_more_than_there_is_are_watched_too() -> None:
    """One of unknown size is held at what was free when it came; who came later has booked some of that."""
    world = World(1, rules=OPEN, memory_mib=20_000)
    unknown = world.submit(None)
    world.settle()
    guarded(world, unknown, Guard(rung="framework", limit_mib=20_000))
    known = world.submit(4_000)
    world.settle()
    guarded(world, known, Guard(rung="framework", limit_mib=4_000))
    assert to_watch(world.state) == (G0,)


@pytest.mark.parametrize(("rung", "watched"), [("mps", (G0,)), ("cgroup", ())])
def test_a_limit_for_each_process_is_none_for_a_task_of_several(
    rung: Literal["mps", "cgroup"], watched: tuple[GpuId, ...]
) -> None:
    world = World(1, rules=OPEN, memory_mib=20_000)
    tasks = [world.submit(8_000), world.submit(8_000)]
    world.settle()
    for task in tasks:
        guarded(world, task, Guard(rung=rung, limit_mib=8_000))
    assert to_watch(world.state) == ()
    key = world.state.active[tasks[0]]
    uses = tuple(ProcessUse(pid=pid, memory_mib=1_000, attempt=key) for pid in (1, 2, 3))
    look = GpuSample(gpu=G0, at=world.now + 1, memory_used_mib=3_000, processes=uses)
    world.emit(GpusSampled(world.now + 1, (look,)))
    assert to_watch(world.state) == watched


# What a memory sample is and is not.


def test_a_memory_sample_tells_of_memory_and_is_no_sample() -> None:
    world, (task, _) = world_of(9_000, 10_000)
    world.wait(10)
    before = world.view(0)
    holds(world, task, 6_000)
    world.now += 0.2
    world.sample_memory()
    after = world.view(0)
    assert (after.used_mib, after.holders[0].observed_mib, after.holders[0].peak_mib) == (7_000, 6_000, 6_000)
    assert after.summaries == before.summaries
    assert after.newest == before.newest
    assert after.blind is None


def test_a_sample_that_is_older_than_a_memory_sample_does_not_undo_it() -> None:
    world, (task, _) = world_of(9_000, 10_000)
    holds(world, task, 6_000)
    world.now += 0.5
    world.sample_memory()
    late = world.now - 0.2
    holds(world, task, 3_000)
    sample = replace(world._sample(world.state.gpus[G0]), at=late)
    world.emit(GpusSampled(world.now, (sample,)))
    view = world.view(0)
    assert (view.holders[0].observed_mib, view.used_mib) == (6_000, 7_000)
    assert view.newest is not None
    assert view.newest.at == late


@pytest.mark.parametrize(
    "look",
    [
        GpuSample(gpu=GpuId("GPU-9"), at=2_000.0, memory_used_mib=1, processes=()),
        GpuSample(gpu=G0, at=2_000.0, fault="gone"),
        GpuSample(gpu=G0, at=2_000.0, memory_used_mib=5),
        GpuSample(gpu=G0, at=0.0, memory_used_mib=5, processes=()),
    ],
)
def test_a_memory_sample_that_tells_nothing_new_changes_nothing(look: GpuSample) -> None:
    world, _ = world_of(9_000, 10_000)
    before = world.view(0)
    world.emit(MemorySampled(world.now, (look,)))
    assert world.view(0) == before
