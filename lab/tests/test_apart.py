"""Where idle GPUs are enough, those that share have no chance and are not ranked, beyond those that a decision names.
It is as if they had been: `World.settle` compares every decision with one for which all were looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from carma.core.model.settings import Gate, PlacementRules, Rules, WarmUp, WindowRules
from carma.core.model.values import GpuId, TaskId
from carma.core.policies import magm
from carma.core.scheduling.decision import Ask
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked
from carma.core.scheduling.queue_order import KEPT_VERDICTS
from carma.core.scheduling.snapshot import views
from carma.plugins import load_policy
from carma.testing.builders import World
from lab_fixtures.random_simulations import EVERY_POLICY

UNWATCHED = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), window=WindowRules(stale_s=1e9))
GPUS, HELD = 24, 20


def mostly_held(policy: Policy, rules: Rules = UNWATCHED) -> World:
    """The last GPUs are idle, and the first of those are beyond what is written out."""
    world = World(GPUS, policy=policy, rules=rules)
    for place in range(HELD):
        world.run(1_000 * (1 + place % 7))
    return world


def watched(policy: Policy, ranked: list[int]) -> Policy:
    def rank(ask: Ask, found: Sequence[GpuView], last: GpuId | None) -> Sequence[Ranked]:
        ranked.append(len(found))
        return policy.rank(ask, found, last)

    return replace(policy, rank=rank)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_every_policy_decides_the_same_without_those_that_have_no_chance(name: str) -> None:
    world = mostly_held(load_policy(name))
    world.foreign[GpuId("GPU-20")] = 5_000  # nobody's, and yet not idle
    world.sample()
    tasks = [world.submit(2_000), world.submit(2_000, exclusive=True), world.submit(2_000), world.submit(30_000)]
    tasks.append(world.submit(500, gpus=2))
    world.settle()
    assert all(world.placed(task) for task in tasks[:2])


def test_only_those_are_ranked_that_could_be_chosen_or_are_written_out() -> None:
    ranked: list[int] = []
    world = mostly_held(watched(magm.POLICY, ranked))
    world.sample()
    ranked.clear()
    task = world.submit(2_000)
    world.settle()
    assert world.gpus_of(task) == (HELD,)
    assert min(ranked) == KEPT_VERDICTS + GPUS - HELD


@pytest.mark.parametrize("gpus", [1, GPUS - HELD + 1])
def test_all_are_ranked_where_idle_ones_do_not_go_first_or_are_too_few(gpus: int) -> None:
    ranked: list[int] = []
    first = replace(UNWATCHED, placement=PlacementRules(idle_first=gpus > 1))
    world = mostly_held(watched(magm.POLICY, ranked), first)
    ranked.clear()
    world.submit(2_000, gpus=gpus)
    world.settle()
    assert min(ranked) == GPUS


@pytest.mark.parametrize("name", [name for name in EVERY_POLICY if load_policy(name).apart])
def test_those_that_say_so_give_a_gpu_the_same_score_whichever_others_are_ranked(name: str) -> None:
    world = mostly_held(load_policy(name))
    world.sample()
    policy, found = world.state.policy, views(world.state, world.now)
    ask = Ask(task=TaskId(1), gpus=1, memory_mib=500, source="declared", at=world.now)
    for some in (found[::2], found[1::3], found[:5], found[-6:]):
        named = {view.gpu.id for view in some}
        assert list(policy.rank(ask, some, None)) == [
            entry for entry in policy.rank(ask, found, None) if entry.gpu in named
        ]
