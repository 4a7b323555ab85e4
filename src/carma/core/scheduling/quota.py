"""Quotas: the maximum that a user may have at once. A task above it waits and delays no task of other users.

The user's later tasks wait too: else small tasks would keep a large one of the same user waiting for ever. A task that
asks for more than the user may ever have delays no task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from carma.core.model.settings import WAITING_LIMIT, QuotaRules
from carma.core.model.units import show_count, show_mib
from carma.core.model.values import Owner, TaskId
from carma.core.scheduling.fairness import NONE_HELD, Accounts, Held

Number = TypeVar("Number", int, float)


class Limits(NamedTuple):
    """Limits of one user; None: no limit."""

    running: int | None = None
    gpus: int | None = None
    memory_share: float | None = None
    waiting: int | None = None


_NOT_LIMITED = (None, None, None)  # running, gpus, memory_share


def limits_of(rules: QuotaRules, name: str) -> Limits:
    waiting = _of(rules.waiting, name)
    return Limits(
        running=_of(rules.running, name),
        gpus=_of(rules.gpus, name),
        memory_share=_of(rules.memory_share, name),
        waiting=WAITING_LIMIT if waiting is None else waiting,
    )


def _of(by_name: Mapping[str, Number], name: str) -> Number | None:
    return by_name.get(name, by_name.get("default")) if by_name else None


class Stop(NamedTuple):
    sentence: str
    for_good: bool = False  # this task alone is above the quota; other tasks may not be


def quota_stop(limits: Limits, name: str, held: Held, wanted: Held, total_mib: int) -> Stop | None:
    """The quota that a user with these holdings would exceed by this task."""
    if limits.running is not None and held.tasks + wanted.tasks > limits.running:
        return Stop(f"user {name} runs {held.tasks} of {show_count(limits.running, 'task')} {_raised('running')}")
    if limits.gpus is not None and held.gpus + wanted.gpus > limits.gpus:
        if wanted.gpus > limits.gpus:
            why = f"asks for {show_count(wanted.gpus, 'GPU')}, and user {name} may hold {limits.gpus} {_raised('gpus')}"
            return Stop(why, for_good=limits.gpus > 0)
        more = f", and this asks for {wanted.gpus}" if held.gpus < limits.gpus else ""
        return Stop(f"user {name} holds {held.gpus} of {show_count(limits.gpus, 'GPU')}{more} {_raised('gpus')}")
    if limits.memory_share is None or not held.tasks:
        return None
    most_mib = int(limits.memory_share * total_mib)
    if held.booked_mib + wanted.booked_mib <= most_mib:
        return None
    booked, most = show_mib(held.booked_mib), show_mib(most_mib)
    return Stop(
        f"user {name} has {booked} of {most} of GPU memory booked, and this asks for {show_mib(wanted.booked_mib)} "
        f"{_raised('memory_share')}"
    )


def _raised(quota: str) -> str:
    return f"(quota.{quota}; an administrator can raise it)"


class PassQuota:
    """The quotas in one pass: what the pass has given to users on top of what they hold, and the users it stopped."""

    def __init__(self, rules: QuotaRules, accounts: Accounts, total_mib: int) -> None:
        self._rules = rules
        self._accounts = accounts
        self._total_mib = total_mib
        self._given: dict[int, Held] = {}
        self._stopped: dict[int, TaskId] = {}  # by user: the task that would exceed a quota
        self._limits: dict[int, Limits] = {}

    def limits(self, owner: Owner) -> Limits:
        known = self._limits.get(owner.uid)
        if known is None:
            known = self._limits[owner.uid] = limits_of(self._rules, owner.name)
        return known

    def stops(self, task: TaskId, owner: Owner, wanted: Callable[[], Held]) -> str | None:
        """Why the task may not start; a sentence."""
        first = self._stopped.get(owner.uid)
        if first is not None:
            return f"task {first} of user {owner.name} is before it, and at a quota"
        limits = self.limits(owner)
        if limits[:3] == _NOT_LIMITED:
            return None
        held = self._accounts.held(owner.uid).plus(self._given.get(owner.uid, NONE_HELD))
        stop = quota_stop(limits, owner.name, held, wanted(), self._total_mib)
        if stop is None:
            return None
        if not stop.for_good:
            self._stopped[owner.uid] = task
        return stop.sentence

    def has_stopped(self, owner: Owner) -> bool:
        """Whether a task of this user is at a quota; the user's later tasks wait behind it."""
        return owner.uid in self._stopped

    def add(self, owner: Owner, held: Held) -> None:
        self._given[owner.uid] = self._given.get(owner.uid, NONE_HELD).plus(held)
