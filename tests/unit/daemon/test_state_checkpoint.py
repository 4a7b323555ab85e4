"""What is kept over a restart, what leaves memory, and what starts empty."""

from __future__ import annotations

import msgspec

from carma.core.machine import step
from carma.core.model.events import GpuDrained, GpusSampled
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import AttemptKey, Dependency, GpuId, TaskId
from carma.core.ports import Checkpoint
from carma.core.propose import propose
from carma.core.scheduling.snapshot import views
from carma.daemon.state_checkpoint import checkpoint, forget, restore
from carma.testing.builders import World
from carma.testing.invariants import validate


def busy() -> World:
    """One of each: running, starting, waiting (overtaken), held, recovering, finished, finished but waited for."""
    world = World(2, rules=Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False)))
    done, waited_for = world.run(1_000), world.run(1_000)
    world.run(20_000)
    recovering = world.run(1_000)
    world.end(done)
    world.end(waited_for)
    world.wait(1)  # the last look shows them no longer
    world.oom(recovering)
    world.settle()
    world.submit(40_000)
    world.submit(1_000, time_limit_s=9.0)
    world.submit(1_000, held=True)
    world.submit(1_000, after=(Dependency(waited_for, "any"),), held=True)
    world.settle()
    world.emit(GpuDrained(world.now, GpuId("GPU-1"), "fan"))
    return world


def test_a_checkpoint_goes_through_json_and_gives_the_same_state() -> None:
    world = busy()
    saved, leaving = checkpoint(world.state, 41)
    decoded = msgspec.json.decode(msgspec.json.encode(saved), type=Checkpoint)
    again = restore(world.state.rules, world.state.policy, decoded)
    assert validate(again) == []
    forget(world.state, leaving)
    assert again.tasks == world.state.tasks
    assert (again.queue, again.active, again.between_attempts) == (
        world.state.queue,
        world.state.active,
        world.state.between_attempts,
    )
    assert (again.drained, again.last_gpu, again.overtaken) == (
        {"GPU-1": "fan"},
        world.state.last_gpu,
        world.state.overtaken,
    )
    assert (again.dependents, again.active_in_array) == (world.state.dependents, world.state.active_in_array)
    assert saved.sequence == 41
    assert checkpoint(again, 41) == (saved, ())


def test_a_finished_task_leaves_the_state_unless_a_task_waits_for_it() -> None:
    world = busy()
    _, leaving = checkpoint(world.state, 1)
    assert [task.id for task in leaving] == [1]
    forget(world.state, leaving)
    assert TaskId(1) not in world.state.tasks
    assert TaskId(2) in world.state.tasks
    assert validate(world.state) == []


def test_nothing_is_placed_after_a_restart_before_the_gpus_were_looked_at() -> None:
    world = World(2)
    world.submit(1_000)
    saved, _ = checkpoint(world.state, 1)
    again = restore(world.state.rules, world.state.policy, saved)
    assert propose(again, world.now) == []
    samples = tuple(world.view(index).newest for index in range(2))
    step(again, GpusSampled(world.now, tuple(sample for sample in samples if sample is not None)))
    assert len(propose(again, world.now)) == 1


def test_the_peak_that_was_stored_survives_and_counts() -> None:
    world = World(1)
    task = world.run(5_000, holds_mib=22_000)
    saved, _ = checkpoint(world.state, 1)
    again = restore(world.state.rules, world.state.policy, saved)
    holder = views(again, world.now)[0].holders[0]
    assert (holder.key, holder.peak_mib, holder.observed_mib) == (AttemptKey(task, 1), 22_000, None)
    assert holder.counted_mib == 22_000


def test_an_empty_server_restores_from_nothing() -> None:
    state = restore(Rules(), World(0).state.policy, None)
    assert (state.tasks, state.gpus, propose(state, 1.0)) == ({}, {}, [])
