"""What a placement policy is. The built-in ones are in policies/; others come as plugins (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from carma.core.model.decision import Ask, Objection, Part, Refusal
from carma.core.model.settings import Rules
from carma.core.model.values import GpuId, Record
from carma.core.scheduling.gpu_view import GpuView, Holder


class Ranked(Record, frozen=True, gc=False):
    gpu: GpuId
    parts: tuple[Part, ...]  # the first decides; larger is better


Rank = Callable[[Ask, Sequence[GpuView], GpuId | None], Sequence[Ranked]]
"""(the request, GPUs that passed every filter in index order, the GPU of the last placement) -> best first.

The third is the nearest accepted GPU before that one where it was not accepted itself."""


AS_OF_S = 60.0  # time after which a policy is asked again although nothing has changed


def as_of(now: float) -> float:
    """Time passed to the policy: `now` rounded down to AS_OF_S. Predictions change slowly, so answers are reused."""
    return now - now % AS_OF_S


Objects = Callable[[Ask, Sequence[Holder]], Objection | None]
"""Why the task must not join those tasks on a GPU. A policy has no objection to a task alone on a GPU."""


ObjectsJointly = Callable[[Ask, Sequence[Sequence[Holder]]], Objection | None]
"""The same for a task on several GPUs at once, with the tasks on each of them."""


class Waits(NamedTuple):
    """A waiting task, for a policy that changes the order of the queue."""

    gpus: int
    alone_s: float | None  # run time alone; None: unknown


Urgent = Callable[[Sequence[Waits], float, int], Sequence[int]]
"""(the waiting tasks in their order, the GPU seconds that running tasks still need, the number of GPUs) -> the
positions of the tasks that go before all others, the first first."""


class Policy(Record, frozen=True):
    """A placement policy: a name and a pure ranking; everything else is optional."""

    name: str
    rank: Rank
    shares: bool = True  # False: one task per GPU
    about: str = ""
    objection: Objects | None = None  # a filter of its own
    urgent: Urgent | None = None
    settings: Record | None = None  # its own settings: a struct with defaults, bounds and descriptions
    bind: Callable[..., Policy] | None = None  # (rules, and its settings if it has any) -> the policy for a server
    uses_gate: bool = True  # False for a policy that predicts activity itself: the caps of the gate do not apply
    joint_objection: ObjectsJointly | None = None  # None: GPUs without an objection each may be used together

    def bound(self, rules: Rules) -> Policy:
        if self.bind is None:
            return self
        return self.bind(rules) if self.settings is None else self.bind(rules, self.settings)

    def refusal(self, ask: Ask, holders: Sequence[Holder]) -> Objection | None:
        """What `objection` answers; a policy of another package that raises is a reason to wait and not a crash."""
        if self.objection is None or not holders:
            return None
        try:
            return self.objection(ask, holders)
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Refusal:
        message = (str(error).splitlines() or [""])[0][:200]
        return Refusal("Policy", f"policy {self.name} failed: {type(error).__name__}: {message}")
