"""A task's other GPUs, and who shares them, are for policies that look at company. Others are spared the work."""

from __future__ import annotations

import pytest

from carma.core.snapshot import views
from carma.plugins import load_policy
from tests.builders import World


@pytest.mark.parametrize(("policy", "others"), [("goodput", 1), ("magm", 0)])
def test_a_tasks_other_gpus_are_told_to_policies_that_look_at_company(policy: str, others: int) -> None:
    world = World(2, policy=load_policy(policy))
    world.run(5_000, gpus=2)
    for view in views(world.state, world.now):
        assert [len(holder.beside) for holder in view.holders] == [others]
