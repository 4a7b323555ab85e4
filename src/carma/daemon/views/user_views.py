"""Users as the API shows them. An administrator sees all users, other users only themselves: what a user had and may
have is private."""

from __future__ import annotations

from carma.core.scheduling.fairness import Account
from carma.core.scheduling.quota import limits_of
from carma.core.state import State
from carma.daemon.auth import Identity
from carma.wire.report_types import UserView


def user_views(state: State, who: Identity, now: float) -> list[UserView]:
    """In the order of their turns."""
    accounts = {**state.accounts.by_uid}
    accounts.setdefault(who.uid, Account(who.name))
    shown = [_view(state, uid, one, now) for uid, one in accounts.items() if who.admin or uid == who.uid]
    return sorted(shown, key=lambda user: (user.level, user.user))


def _view(state: State, uid: int, account: Account, now: float) -> UserView:
    memory_h, sm_h = state.accounts.usage(account, now)
    limits = limits_of(state.rules.quota, account.name)
    memory_mib = sum(gpu.memory_mib for gpu in state.usable)
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
        memory_limit_mib=None if limits.memory_share is None else int(limits.memory_share * memory_mib),
        waiting_limit=limits.waiting,
    )
