"""What a placement policy is. The built-in ones are in policies/; others come as plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, Record, TaskId
from carma.core.scheduling.decision import Ask, Objection, Part, Refusal
from carma.core.scheduling.gpu_view import GpuView, Holder


class Ranked(Record, frozen=True, gc=False):
    gpu: GpuId
    parts: tuple[Part, ...]  # the first decides; larger is better


Rank = Callable[[Ask, Sequence[GpuView], GpuId | None], Sequence[Ranked]]
"""(what is asked, GPUs that passed every filter in index order, the last placement's place among them) -> best first.

The third is the GPU of the last placement or, when that one is closed, the nearest open one before it."""


AS_OF_S = 60.0  # what a policy has against company is looked at anew so often, while nothing changes


def as_of(now: float) -> float:
    """The time that a policy is told. Predictions change slowly: within a span the answer to a question stays the same,
    and need not be asked for again."""
    return now - now % AS_OF_S


Against = Callable[[Ask, Sequence[Holder]], Objection | None]
"""What a policy has against a task beside those holders; never anything against one alone on a GPU."""


Jointly = Callable[[Ask, Sequence[Sequence[Holder]]], Objection | None]
"""What a policy has against a task on several GPUs at once, beside those who hold each of them."""


class Move(Record, frozen=True, gc=False):
    """A running task that would do better elsewhere, and why, in a sentence."""

    task: TaskId
    reason: str


Moves = Callable[[Sequence[GpuView]], Sequence[Move]]
"""(every GPU as it is now, in index order) -> the tasks to move, the most urgent first. Those that cannot be asked to
save are passed over; where they go then is `rank`'s business, as with any task that waits."""


class Waits(NamedTuple):
    """One of those who wait, for a policy that looks at all of them."""

    gpus: int
    alone_s: float | None  # what it would take alone; None: nobody knows


Urgent = Callable[[Sequence[Waits], float, int], Sequence[int]]
"""(those who wait, in their order; what the running tasks still have to do, in GPU-seconds; GPUs) -> the places of
those whose turn it is before all others, the first first."""


class Policy(Record, frozen=True):
    """A placement policy: a name, whether it shares GPUs at all, and a pure ranking. `against` is a filter of its own;
    `moves` says who should be elsewhere; `bind` makes the policy for a server's rules, where it depends on them."""

    name: str
    rank: Rank
    shares: bool = True
    about: str = ""
    against: Against | None = None
    urgent: Urgent | None = None
    bind: Callable[[Rules], Policy] | None = None
    gated: bool = True  # whether the gate's caps on utilisation apply: not to one that predicts slow-downs itself
    moves: Moves | None = None  # None: it never wants anybody elsewhere
    jointly: Jointly | None = None  # None: what it has nothing against one by one may be had together

    def bound(self, rules: Rules) -> Policy:
        return self if self.bind is None else self.bind(rules)

    def refusal(self, ask: Ask, holders: Sequence[Holder]) -> Objection | None:
        """What `against` answers; a policy of another package that raises is a reason to wait and not a crash."""
        if self.against is None or not holders:
            return None
        try:
            return self.against(ask, holders)
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Refusal:
        message = (str(error).splitlines() or [""])[0][:200]
        return Refusal("Policy", f"policy {self.name} failed: {type(error).__name__}: {message}")
