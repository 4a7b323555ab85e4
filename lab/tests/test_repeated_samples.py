"""A sampler may hand out the very list of processes that it handed out before; then less of a sample is looked at
(observe.py). What comes of it is the same, bit for bit, as with lists that are equal.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carma.core.attempt_end import ended
from carma.core.machine import step
from carma.core.model.events import AnyEvent, AttemptEnded, GpusSampled, MemorySampled
from carma.core.model.values import Activity, AttemptKey, GpuSample, ProcessUse
from carma.core.state import State
from carma.core.telemetry.measurements import AttemptOnGpu
from carma.core.telemetry.usage import note
from carma.testing.builders import World
from lab_fixtures.random_simulations import simulations
from tests.unit.core.attribution_world import G0, OPEN


def with_other_lists(event: AnyEvent) -> AnyEvent:
    """The same, and no sample has its processes from another."""
    if not isinstance(event, GpusSampled):
        return event
    return GpusSampled(event.at, tuple(_with_another(sample) for sample in event.samples))


def _with_another(sample: GpuSample) -> GpuSample:
    return sample if sample.processes is None else replace(sample, processes=(*sample.processes,))


@pytest.mark.parametrize("policy", ["magm", "goodput"])
def test_what_is_seen_does_not_depend_on_whose_list_it_is(policy: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = data.draw(simulations(policy))
        other = State(made.rules, made.setup.policy)
        for event in made.events():
            if isinstance(event, AttemptEnded):
                facts = ended(other, event.key, event.outcome, event.at)
                assert (facts.energy_j, facts.activity) == (event.energy_j, event.activity)
                assert (facts.used_s, facts.alone) == (event.used_s, event.alone)
            step(other, with_other_lists(event))
            assert note(other) == note(made.state)

    check()


def one_at_work() -> tuple[World, AttemptKey, tuple[ProcessUse, ...]]:
    """A task whose last sample shows 5,000 MiB, and the process list of that sample."""
    world = World(1, rules=OPEN)
    key = world.state.active[world.run(5_000)]
    world.wait(5)
    newest = world.state.live_of(G0).window.newest
    assert newest is not None
    assert newest.processes
    return world, key, newest.processes


def seen_of(world: World, key: AttemptKey) -> AttemptOnGpu:
    return world.state.tracks[key].on[G0]


def shown(world: World, processes: tuple[ProcessUse, ...]) -> GpuSample:
    world.now += 1.0
    used_mib = sum(use.memory_mib or 0 for use in processes)
    return GpuSample(
        gpu=G0, at=world.now, memory_used_mib=used_mib, processes=processes, activity=Activity(sm_active=0.5)
    )


def test_a_process_list_that_is_repeated_after_a_quick_sample_counts_again() -> None:
    world, key, processes = one_at_work()
    step(world.state, GpusSampled(world.now, (shown(world, processes),)))
    step(world.state, MemorySampled(world.now, (shown(world, ()),)))
    assert seen_of(world, key).now_mib == 0
    step(world.state, GpusSampled(world.now, (shown(world, processes),)))
    assert seen_of(world, key).now_mib == 5_000


def test_one_that_came_between_two_samples_with_the_same_list_is_noticed() -> None:
    world, first, processes = one_at_work()
    world.settle()
    second = AttemptKey(world.submit(5_000), 1)
    both = (*processes, ProcessUse(pid=77, memory_mib=5_000, attempt=second))
    step(world.state, GpusSampled(world.now, (shown(world, both),)))  # before it is known where it was sent
    world.settle()
    assert world.placed(second.task)
    step(world.state, GpusSampled(world.now, (shown(world, both),)))
    assert seen_of(world, second).first_at == world.now
    assert seen_of(world, first).now_mib == 5_000


def test_memory_beyond_the_same_list_is_somebodys() -> None:
    world, _, processes = one_at_work()
    step(world.state, GpusSampled(world.now, (shown(world, processes),)))
    sample = shown(world, processes)
    step(world.state, GpusSampled(world.now, (replace(sample, memory_used_mib=15_000),)))
    beside = world.state.live_of(G0).newest_members
    assert beside is not None
    assert beside.foreign
