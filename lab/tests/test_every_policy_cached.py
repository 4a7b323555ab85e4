"""Every policy on a server with idle, shared and foreign GPUs: `World.settle` compares each decision with one that is
made without the verdict cache."""

from __future__ import annotations

import pytest

from carma.core.model.settings import Gate, Rules, WarmUp, WindowRules
from carma.core.model.values import GpuId
from carma.core.scheduling.policy import Policy
from carma.plugins import load_policy
from carma.testing.builders import World
from lab_fixtures.random_simulations import EVERY_POLICY

UNWATCHED = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), window=WindowRules(stale_s=1e9))
GPUS, HELD = 24, 20


def mostly_held(policy: Policy, rules: Rules = UNWATCHED) -> World:
    """The last GPUs are idle, and beyond those that are written out with a decision."""
    world = World(GPUS, policy=policy, rules=rules)
    for place in range(HELD):
        world.run(1_000 * (1 + place % 7))
    return world


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_every_policy_decides_the_same_with_and_without_the_verdict_cache(name: str) -> None:
    world = mostly_held(load_policy(name))
    world.foreign[GpuId("GPU-20")] = 5_000  # memory of no task, but the GPU is not idle
    world.sample()
    tasks = [world.submit(2_000), world.submit(2_000, exclusive=True), world.submit(2_000), world.submit(30_000)]
    tasks.append(world.submit(500, gpus=2))
    world.settle()
    assert all(world.placed(task) for task in tasks[:2])
