"""What a placement policy is. The built-in ones are in policies/; others come as plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carma.core.decision import Ask, Part, Refusal
from carma.core.model import GpuId, Record
from carma.core.settings import Rules
from carma.core.view import GpuView, Holder


class Ranked(Record, frozen=True, gc=False):
    gpu: GpuId
    parts: tuple[Part, ...]  # the first decides; larger is better


Rank = Callable[[Ask, Sequence[GpuView], GpuId | None], Sequence[Ranked]]
"""(what is asked, GPUs that passed every filter in index order, the last placement's place among them) -> best first.

The third is the GPU of the last placement or, when that one is closed, the nearest open one before it."""


Against = Callable[[Ask, Sequence[Holder]], Refusal | None]
"""What a policy has against a task beside those holders; never anything against one alone on a GPU."""


class Policy(Record, frozen=True):
    """A placement policy: a name, whether it shares GPUs at all, and a pure ranking. `against` is a filter of its own;
    `bind` makes the policy for a server's rules, where it depends on them."""

    name: str
    rank: Rank
    shares: bool = True
    about: str = ""
    against: Against | None = None
    bind: Callable[[Rules], Policy] | None = None
    gated: bool = True  # whether the gate's caps on utilisation apply: not to one that predicts slow-downs itself

    def bound(self, rules: Rules) -> Policy:
        return self if self.bind is None else self.bind(rules)

    def objects(self, ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
        return self.against(ask, holders) if self.against is not None and holders else None
