"""What lets a task start after a pass in which none could. tests/scenario/test_verdict_cache.py compares whole
histories."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.machine import step
from carma.core.model.decision import Ask, Part, Refusal
from carma.core.model.events import GpusFound, GpusSampled, StopRequested, TaskReleased, TaskRestored
from carma.core.model.settings import Gate, Rules, WarmUp, WindowRules
from carma.core.model.values import Dependency, GpuId, TaskId
from carma.core.policies import magm
from carma.core.propose import propose
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.placement import Policy, Ranked
from carma.daemon.state_checkpoint import checkpoint, forget
from carma.testing.builders import World, gpu

UNWATCHED = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), window=WindowRules(stale_s=1e9))


def crowded(rules: Rules = UNWATCHED, **holder: object) -> tuple[World, TaskId]:
    """One GPU with a large task on it, and one that waits for all of it."""
    world = World(1, rules=rules)
    world.run(30_000, **holder)  # type: ignore[arg-type]
    first = world.submit(39_000)
    world.settle()
    assert not world.placed(first)
    return world, first


def test_a_dependency_that_ends_in_the_queue_lets_the_next_one_go() -> None:
    world, _ = crowded(time_limit_s=600.0)
    held = world.submit(500, held=True)
    after = world.submit(500, after=(Dependency(held, "any"),), time_limit_s=60.0)
    world.settle()
    assert not world.placed(after)
    world.stop(held)
    world.settle()
    assert world.placed(after)


def test_an_end_that_is_overdue_makes_room_in_time() -> None:
    """The start that is kept for the first moves on with it, and a short one fits in before."""
    world, _ = crowded(runtime_s=100.0)
    started = world.task(TaskId(1)).attempts[-1].started_at
    assert started is not None
    world.now = started + 70.0
    short = world.submit(9_000, runtime_s=40.0)
    world.settle()
    assert not world.placed(short), "it would be there until 10 s after the start that is kept"
    world.now = started + 101.0
    world.settle()
    assert world.placed(short)


def test_those_behind_the_first_may_go_when_it_is_cancelled() -> None:
    world, first = crowded(time_limit_s=600.0)
    long = world.submit(9_000, time_limit_s=6_000.0)
    world.settle()
    assert not world.placed(long)
    world.stop(first)
    world.settle()
    assert world.placed(long)


def test_a_time_to_begin_comes_without_anything_else() -> None:
    world, _ = crowded(time_limit_s=600.0)
    later = world.submit(500, begin_at=world.now + 5.0, time_limit_s=60.0)
    world.settle()
    assert not world.placed(later)
    world.now += 5.0
    world.settle()
    assert world.placed(later)


def test_a_gpu_that_nobody_samples_any_more_is_kept_for_nobody() -> None:
    """The first wants two GPUs, was overtaken often, and one of the two can no longer be named."""
    rules = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False))
    world = World(2, rules=rules)
    alone = world.run(30_000, exclusive=True, runtime_s=1_000.0)
    world.run(20_000, runtime_s=1_000.0)
    first = world.submit(39_000, gpus=2)
    world.state.overtaken[first] = 2 * rules.queue.overtakes
    small = world.submit(500, runtime_s=1.0)
    world.settle()
    assert not world.placed(small)
    other = world.state.gpus[GpuId(f"GPU-{1 - world.gpus_of(alone)[0]}")]
    for _ in range(int(rules.window.stale_s) + 2):
        world.now += 1.0
        world.emit(GpusSampled(world.now, (world._sample(other),)))
        world.settle()
    assert world.placed(small)


def test_a_policy_that_finds_no_gpu_is_asked_again_as_time_goes_by() -> None:
    """A policy may use the expected ends of tasks, which change without an event."""

    def patient(_ask: Ask, views: Sequence[GpuView], _last: GpuId | None) -> list[Ranked]:
        overdue = [view for view in views if any(holder.ends_at > 1_120.0 for holder in view.holders)]
        idle = [view for view in views if not view.holders]
        return [Ranked(view.gpu.id, (Part("order", 0.0),)) for view in (*idle, *overdue)]

    world = World(1, rules=UNWATCHED, policy=Policy("patient", patient))
    world.run(10_000, runtime_s=50.0)
    second = world.submit(10_000)
    world.settle()
    assert not world.placed(second)
    world.now = 1_110.0
    world.settle()
    assert world.placed(second)


def test_of_two_alike_the_second_is_not_asked_for_when_the_policy_found_no_gpu_for_the_first() -> None:
    """A refusal holds during a whole pass, as in `explain`."""

    def partial(ask: Ask, views: Sequence[GpuView], _last: GpuId | None) -> list[Ranked]:
        return [Ranked(view.gpu.id, (Part("order", 0.0),)) for view in views if ask.task % 2]

    world = World(2, rules=UNWATCHED, policy=Policy("partial", partial))
    _, _, third, fourth, fifth = (world.submit(1_000) for _ in range(5))
    world.settle()
    assert world.placed(third)
    assert not world.placed(fourth)
    assert not world.placed(fifth), "which it would have taken"


def test_a_smaller_gpu_of_the_same_name_is_looked_at_by_the_watchdog() -> None:
    world = World(1, rules=UNWATCHED)
    over = world.run(10_000, holds_mib=14_000)
    world.run(10_000)
    world.settle()
    step(world.state, GpusFound(world.now, (gpu(0, 24_100),)))
    due = propose(world.state, world.now)
    assert [event.task for event in due if isinstance(event, StopRequested)] == [over]


def test_what_a_sample_shows_of_a_task_depends_on_whether_its_end_is_remembered() -> None:
    """The process of an ended task is gone. A process of an unknown task counts as foreign."""
    world = World(1, rules=UNWATCHED)
    gone = world.run(30_000)
    waits = world.submit(20_000, held=True)
    world.end(gone)  # no sample follows
    world.settle()
    ended = world.task(gone)
    forget(world.state, [ended])
    world.emit(TaskReleased(world.now, waits))
    world.settle()
    assert not world.placed(waits)
    world.emit(TaskRestored(world.now, ended))
    world.settle()
    assert world.placed(waits)


def test_a_task_whose_processes_were_in_the_last_sample_is_not_archived_before_the_next() -> None:
    """Otherwise, after a checkpoint at that moment, its processes would count as foreign and close a free GPU."""
    world = World(1, rules=UNWATCHED)
    gone = world.run(30_000)
    world.end(gone)
    world.settle()
    saved, finished = checkpoint(world.state, 0)
    assert ([task.id for task in saved.tasks], finished) == ([gone], ())
    forget(world.state, finished)
    waits = world.submit(20_000)
    world.settle()
    assert world.placed(waits)
    world.wait(1)
    assert [task.id for task in checkpoint(world.state, 0)[1]] == [gone]


def test_nor_does_a_gpu_that_is_gone_keep_it() -> None:
    world = World(1, rules=UNWATCHED)
    gone = world.run(30_000)
    world.end(gone)
    world.settle()
    world.emit(GpusFound(world.now, ()))
    assert [task.id for task in checkpoint(world.state, 0)[1]] == [gone]


# The objection of a policy may disappear although the GPU has no more room than before.
NO = Refusal("Slowdown", "not now")


def refused(policy: Policy) -> tuple[World, TaskId]:
    """One task on a GPU, with much more booked than it takes, and one that the policy keeps out."""
    world = World(1, rules=UNWATCHED, policy=policy)
    world.run(10_000, holds_mib=1_000)
    task = world.submit(500)
    for _ in range(2):
        world.settle()
        assert not world.placed(task)
    return world, task


def test_other_company_lets_a_task_in_that_the_policy_kept_out() -> None:
    def objection(_ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
        return None if any((one.peak_mib or 0) >= 5_000 for one in holders) else NO

    world, task = refused(Policy("heavy neighbours", magm.POLICY.rank, objection=objection))
    world.now += 1.0
    for key in world.memory:
        world.memory[key] = 6_000  # within its booking: the GPU has no more room than before
    world.sample()
    world.settle()
    assert world.placed(task)


def test_time_lets_a_task_in_that_the_policy_kept_out() -> None:
    def objection(ask: Ask, _holders: Sequence[Holder]) -> Refusal | None:
        return NO if ask.at < 2_040.0 else None  # times are told by the minute

    world, task = refused(Policy("later", magm.POLICY.rank, objection=objection))
    world.now = 2_039.0
    world.settle()
    assert not world.placed(task)
    world.now = 2_041.0
    world.settle()
    assert world.placed(task)


def test_a_newcomer_is_looked_at_though_the_policy_kept_all_others_out() -> None:
    def objection(ask: Ask, _holders: Sequence[Holder]) -> Refusal | None:
        return NO if ask.memory_mib == 500 else None

    world, task = refused(Policy("no small ones", magm.POLICY.rank, objection=objection))
    newcomer = world.submit(600, runtime_s=10.0)  # gone long before the first could start
    world.settle()
    assert world.placed(newcomer)
    assert not world.placed(task)
