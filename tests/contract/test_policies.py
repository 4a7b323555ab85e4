"""Every built-in policy keeps the contract of policies, and the contract finds what is wrong with others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from carma.core.model.decision import Ask, Part, Refusal
from carma.core.model.values import GpuId
from carma.core.policies import magm
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Ranked
from carma.plugins import POLICIES, load_policy, names
from carma.testing.policy_contract import PolicyContract

TESTS = [name for name in vars(PolicyContract) if name.startswith("test_")]
RANKS, SCORES, SAME, OBJECTS = TESTS[1:5]


@pytest.mark.parametrize("name", names(POLICIES))
class TestBuiltIn(PolicyContract):
    @pytest.fixture(autouse=True)
    def _policy(self, name: str) -> None:
        type(self).policy = load_policy(name)


ANSWERS = count()


def counting(_ask: Ask, views: Sequence[GpuView], _: GpuId | None) -> list[Ranked]:
    return [Ranked(views[0].gpu.id, (Part("answers", next(ANSWERS)),))]


WRONG = {
    RANKS: Policy("twice", lambda ask, views, last: [*magm.POLICY.rank(ask, views, last)] * 2),
    SCORES: Policy("upside down", lambda ask, views, last: magm.POLICY.rank(ask, views, last)[::-1]),
    SAME: Policy("counting", counting),
    OBJECTS: Policy("silent", magm.POLICY.rank, objection=lambda _, __: Refusal("", "")),
}


@pytest.mark.parametrize("test", WRONG)
def test_the_contract_finds_what_is_wrong(test: str) -> None:
    class Contract(PolicyContract):
        policy = WRONG[test]

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()
