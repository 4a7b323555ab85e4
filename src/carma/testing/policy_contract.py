"""What every placement policy must do, as tests: subclass `PolicyContract` and set `policy`.

    class TestQuietBus(PolicyContract):
        policy = carma_quiet_bus.POLICY

pytest finds the inherited tests. This module does not import pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import ClassVar

from carma.core.model.decision import Ask
from carma.core.model.settings import PlacementRules, Rules
from carma.core.model.values import Demand, GpuId, TaskId
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy
from carma.testing.builders import World

LIGHT = Demand(0.1, 0.05, 0.05)
HEAVY = Demand(0.9, 0.5, 0.6)
TASKS_MIB = (2_000, 5_000, None, 12_000, 30_000)  # None: of unknown size


def asks() -> Iterator[Ask]:
    """Requests of known and unknown size and demand."""
    for memory_mib in (1, 4_000, 40_000):
        for demand in (None, LIGHT, HEAVY):
            alone_s = None if demand is None else 600.0
            yield Ask(TaskId(99), 1, memory_mib, "declared", demand=demand, alone_s=alone_s, at=5_000.0)


class PolicyContract:
    policy: ClassVar[Policy]

    @cached_property
    def bound(self) -> Policy:
        return self.policy.bound(Rules())

    @cached_property
    def views(self) -> Sequence[GpuView]:
        """Four GPUs: one idle, one whose metrics are unknown, two shared. The tasks on them have settled."""
        world = World(4, policy=self.policy, rules=Rules(placement=PlacementRules(idle_first=False)))
        world.activity = {GpuId("GPU-1"): (None, None, None), GpuId("GPU-2"): (0.7, 0.3, 0.2)}
        for mib in (8_000, 9_000, 10_000):
            world.run(mib)
        return [world.view(index) for index in range(4)]

    @cached_property
    def holders(self) -> Sequence[Holder]:
        return [holder for view in self.views for holder in view.holders]

    def test_it_has_a_name_and_a_description_of_one_line(self) -> None:
        assert self.policy.name == self.policy.name.strip() != ""
        assert "\n" not in self.policy.about

    def test_it_ranks_offered_gpus_only_and_each_at_most_once(self) -> None:
        for ask in asks():
            for views in (self.views, self.views[:1], self.views[1:3], self.views[::-1]):
                ranked = [entry.gpu for entry in self.bound.rank(ask, views, views[0].gpu.id)]
                assert len(ranked) == len(set(ranked))
                assert set(ranked) <= {view.gpu.id for view in views}

    def test_every_score_has_named_finite_parts_and_the_first_part_decides(self) -> None:
        for ask in asks():
            ranked = self.bound.rank(ask, self.views, None)
            for entry in ranked:
                assert entry.parts
                assert all(part.name and isfinite(part.value) for part in entry.parts)
            assert all(one.parts[0].value >= other.parts[0].value for one, other in pairwise(ranked))

    def test_the_same_question_gets_the_same_answer(self) -> None:
        for ask in asks():
            assert list(self.bound.rank(ask, self.views, None)) == list(self.bound.rank(ask, self.views, None))
            assert self.bound.refusal(ask, self.holders) == self.bound.refusal(ask, self.holders)

    def test_it_has_no_objection_to_a_task_alone_and_says_why_it_has_one_otherwise(self) -> None:
        for ask in asks():
            assert self.bound.refusal(ask, []) is None
            for count in range(1, len(self.holders) + 1):
                refusal = self.bound.refusal(ask, self.holders[:count])
                assert refusal is None or (refusal.code and refusal.sentence)

    def test_every_task_that_fits_an_idle_server_runs_in_the_end(self) -> None:
        """`World` checks the invariants of the state after every step."""
        world = World(2, policy=self.policy)
        tasks = [world.submit(mib) for mib in TASKS_MIB * 2]
        for _ in range(20 * len(tasks)):
            world.settle()
            world.start(*(task for task in world.state.active if not world.task(task).attempts[-1].started_at))
            world.wait(30.0)
            if world.state.active:
                world.end(min(world.state.active))
        assert [str(world.outcome(task)) for task in tasks] == ["Succeeded()"] * len(tasks)
