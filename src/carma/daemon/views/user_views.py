"""Users as the API shows them, and the quotas that are checked when something is submitted.

An administrator sees all users, anybody else only themselves: what others had and may have is private.
"""

from __future__ import annotations

from carma.core.model.units import show_count
from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.core.scheduling.fairness import Account
from carma.core.scheduling.feasibility import by_size
from carma.core.scheduling.quota import Limits, limits_of
from carma.core.state import State
from carma.daemon.auth import Identity
from carma.errors import QuotaReached
from carma.wire.user_types import UserView

_ASK = "; an administrator can change the setting"


def user_views(state: State, who: Identity, now: float) -> list[UserView]:
    """Whose turn comes first, first."""
    accounts = {**state.accounts.by_uid}
    accounts.setdefault(who.uid, Account(who.name))
    seen = [_view(state, uid, one, now) for uid, one in accounts.items() if who.admin or uid == who.uid]
    return sorted(seen, key=lambda user: (user.level, user.user))


def _view(state: State, uid: int, account: Account, now: float) -> UserView:
    memory_h, sm_h = state.accounts.usage(account, now)
    limits = limits_of(state.rules.quota, account.name)
    return UserView(
        user=account.name,
        uid=uid,
        share=state.accounts.share_of(account.name),
        memory_h=memory_h,
        sm_h=sm_h,
        level=state.accounts.level(uid),
        running=account.held.tasks,
        gpus=account.held.gpus,
        booked_mib=account.held.booked_mib,
        waiting=account.waiting,
        running_limit=limits.running,
        gpus_limit=limits.gpus,
        memory_limit_mib=_memory_mib(state, limits),
        waiting_limit=limits.waiting,
    )


def _memory_mib(state: State, limits: Limits) -> int | None:
    if limits.memory_share is None:
        return None
    return int(limits.memory_share * sum(gpu.memory_mib for gpu in by_size(state)))


class Submitting:
    """Tasks that are checked but not yet part of the state: several submissions are committed in one transaction."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[TaskId, int]] = {}  # user -> first id of the submission -> number of tasks

    def others(self, uid: int, first: TaskId) -> int:
        """How many tasks the user's other submissions have."""
        return sum(count for other, count in self._counts.get(uid, {}).items() if other != first)

    def add(self, uid: int, first: TaskId, count: int) -> None:
        self._counts.setdefault(uid, {})[first] = count

    def remove(self, uid: int, first: TaskId) -> None:
        """Stored, or given up."""
        counts = self._counts.get(uid, {})
        counts.pop(first, None)
        if not counts:
            self._counts.pop(uid, None)


def check_quota(state: State, owner: Owner, spec: TaskSpec, count: int = 1) -> None:
    """Whether `count` more tasks may wait, and whether each could ever start; raises QuotaReached."""
    limits = limits_of(state.rules.quota, owner.name)
    if limits.gpus is not None and spec.gpus > limits.gpus:
        asks = show_count(spec.gpus, "GPU")
        raise QuotaReached(
            f"the task asks for {asks}, and user {owner.name} may hold {limits.gpus} at once (quota.gpus)",
            "ask for fewer GPUs" + _ASK,
        )
    if limits.running == 0:
        raise QuotaReached(f"user {owner.name} may run no task here (quota.running is 0)", "ask an administrator")
    if limits.waiting is None:
        return
    waiting = state.accounts.waiting(owner.uid)
    if waiting + count > limits.waiting:
        more = "" if count == 1 else f", and {count} more are submitted"
        raise QuotaReached(
            f"user {owner.name} has {waiting} of {limits.waiting} waiting tasks (quota.waiting){more}",
            "wait until some have started, or cancel some" + _ASK,
        )
