"""A task's other GPUs and their neighbours are collected only for policies that use them."""

from __future__ import annotations

import pytest

from carma.core.scheduling.gpu_view import MAX_JOINT_GPUS
from carma.core.scheduling.snapshot import views
from carma.plugins import load_policy
from carma.testing.builders import World


@pytest.mark.parametrize(("policy", "others"), [("goodput", 1), ("magm", 0)])
def test_policies_that_use_neighbours_get_the_other_gpus_of_a_task(policy: str, others: int) -> None:
    world = World(2, policy=load_policy(policy))
    world.run(5_000, gpus=2)
    for view in views(world.state, world.now):
        assert [len(holder.other_gpus) for holder in view.holders] == [others]


@pytest.mark.parametrize(("gpus", "others"), [(MAX_JOINT_GPUS, MAX_JOINT_GPUS - 1), (MAX_JOINT_GPUS + 1, 0)])
def test_a_task_on_more_gpus_than_are_looked_at_together_is_judged_gpu_by_gpu(gpus: int, others: int) -> None:
    world = World(gpus, policy=load_policy("goodput"))
    world.run(5_000, gpus=gpus)
    for view in views(world.state, world.now):
        assert [len(holder.other_gpus) for holder in view.holders] == [others]
