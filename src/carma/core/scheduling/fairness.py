"""Accounts of the users: what each has used of the GPUs and holds now. Fair shares (fair_order.py) and quotas
(quota.py) read them.

The unit is the card-hour: the memory of a whole card booked for an hour, or its SM activity for an hour. Both decay
with a half-life, by the time of events; there is no clock here. Memory is counted when a user's bookings change, SM
activity when an event records it (UseNoted, MemoryObserved, AttemptEnded), never at a sample. The level of a user
decides the order. It changes with the user's tasks and their recorded use, and for all users with each full minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, log
from typing import NamedTuple

from carma.core.model.decision import Ask
from carma.core.model.settings import FairnessRules, QuotaRules, Rules
from carma.core.model.status import Estimating, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.values import Gpu, GpuId, Placement, Record, TaskId

HOUR_S = 3600.0
MINUTE_S = 60.0  # interval at which all levels are updated; at full minutes, so that a replay does the same
CARD = 1_000_000  # a whole card; integers, so that months of additions and subtractions leave no remainder
NEGLIGIBLE_H = 1e-6
_MAX_HALF_LIVES = 1000.0  # use that is older counts as none


class UserUsage(Record, frozen=True, kw_only=True):
    """One user's account for the store, as of the checkpoint's time."""

    uid: int
    name: str
    memory_h: float = 0.0
    sm_h: float = 0.0


class Held(NamedTuple):
    """What a running task holds, or all running tasks of a user."""

    tasks: int = 0
    gpus: int = 0
    booked_mib: int = 0
    cards: int = 0  # of memory; see CARD

    def plus(self, other: Held, sign: int = 1) -> Held:
        return Held(
            self.tasks + sign * other.tasks,
            self.gpus + sign * other.gpus,
            self.booked_mib + sign * other.booked_mib,
            self.cards + sign * other.cards,
        )


NONE_HELD = Held()


class Account:
    """Use of one user. The hours are in units of the accounts' time `at`: later use counts more by the decay since
    then."""

    __slots__ = ("held", "memory_h", "name", "since", "sm_h", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory_h = 0.0  # until `since`
        self.sm_h = 0.0
        self.since = 0.0
        self.held = NONE_HELD
        self.waiting = 0  # tasks that are neither running nor finished


def held_by(placement: Placement, gpus: Mapping[GpuId, Gpu]) -> Held:
    """A task alone on its GPUs holds all of their memory; so does a task whose GPU is gone."""
    booked_mib = cards = 0
    for name in placement.gpus:
        gpu, mib = gpus.get(name), placement.booking.memory_mib
        if gpu is None or placement.booking.alone:
            booked_mib += mib if gpu is None else gpu.memory_mib
            cards += CARD
        else:
            booked_mib += mib
            cards += min(CARD, round(CARD * mib / gpu.memory_mib))
    return Held(1, len(placement.gpus), booked_mib, cards)


def sm_s(task: Task) -> float:
    """SM activity times time of the newest attempt, as recorded; unknown activity is not counted."""
    if not task.attempts:
        return 0.0
    seen = task.attempts[-1]
    active = seen.activity.sm_active if seen.activity is not None else None
    return 0.0 if active is None else active * seen.used_s


class Accounts:
    def __init__(self, rules: Rules) -> None:
        self.rules: FairnessRules = rules.fairness
        # Current bookings count as if they lasted this much longer: else the first user of an empty server would take
        # all of it, and wait only afterwards.
        self._ahead_h = rules.queue.assumed_runtime_s / HOUR_S
        self._weight = self.rules.memory_weight + self.rules.sm_weight
        self.limited = rules.quota != QuotaRules()
        self.at = 0.0
        self.by_uid: dict[int, Account] = {}
        self.by_task: dict[TaskId, Held] = {}
        self._gpus: Mapping[GpuId, Gpu] = {}  # at the last event
        self._outdated: set[TaskId] = set()  # tasks whose holdings were counted before the GPUs changed

    # -- events ------------------------------------------------------------------------------------------------
    def follow(self, before: Task | None, task: Task | None, gpus: Mapping[GpuId, Gpu], now: float) -> bool:
        """Update the account for one changed task; returns whether its user's level has changed."""
        known = task or before
        assert known is not None
        account = self.by_uid.get(known.owner.uid)
        if account is None:
            account = self.by_uid[known.owner.uid] = Account(known.owner.name)
        if gpus is not self._gpus:
            self._gpus, self._outdated = gpus, set(self.by_task)
        changed = False
        if before is None or task is None or task.status is not before.status or task.id in self._outdated:
            account.waiting += waits(task) - waits(before)
            changed = self._hold(account, known.id, task, now)
        if before is not None and task is not None and len(before.attempts) == len(task.attempts):
            more_s = sm_s(task) - sm_s(before)
            if more_s != 0.0:  # a rounded mean may also decrease
                account.sm_h += more_s / HOUR_S * self._worth(now)
                changed = True
        return changed

    def _hold(self, account: Account, task_id: TaskId, task: Task | None, now: float) -> bool:
        """Update what the task holds; returns whether that changed."""
        self._outdated.discard(task_id)
        was, held = self.by_task.get(task_id, NONE_HELD), NONE_HELD
        if task is not None and isinstance(task.status, Starting | Running):
            held = held_by(task.status.placement, self._gpus)
        if held == was:
            return False
        self._count(account, now)
        account.held = account.held.plus(held).plus(was, -1)
        if held.tasks:
            self.by_task[task_id] = held
        else:
            del self.by_task[task_id]
        return True

    def minute(self, now: float) -> bool:
        """Counts and decays all use at each full minute. Returns whether a minute was full."""
        at = floor(now / MINUTE_S) * MINUTE_S
        if at <= self.at:
            return False
        worth = self._worth(at)
        for uid, account in list(self.by_uid.items()):
            self._count(account, at)
            account.memory_h /= worth
            account.sm_h /= worth
            if not account.waiting and not account.held.tasks and account.memory_h + account.sm_h < NEGLIGIBLE_H:
                del self.by_uid[uid]
        self.at = at
        return True

    def _worth(self, at: float) -> float:
        """The weight of an hour of use at that time, relative to `self.at`."""
        return float(2.0 ** min((at - self.at) / self.rules.half_life_s, _MAX_HALF_LIVES))

    def _count(self, account: Account, now: float) -> None:
        """Add the memory held since the last call. It is the integral, so the number of calls does not matter."""
        if account.held.cards and now > account.since:
            spread_h = self.rules.half_life_s / log(2.0) / HOUR_S
            span_h = spread_h * (self._worth(now) - self._worth(account.since))
            account.memory_h += account.held.cards / CARD * span_h
        account.since = max(account.since, now)

    # -- queries -----------------------------------------------------------------------------------------------
    def level(self, uid: int) -> float:
        """Use and holdings in relation to the user's share: the lowest level goes first."""
        account = self.by_uid.get(uid)
        if account is None:
            return 0.0
        had = self.rules.memory_weight * account.memory_h + self.rules.sm_weight * account.sm_h
        return had / self.share_of(account.name) + self.level_of_held(account.name, account.held.cards)

    def level_of_held(self, name: str, cards: int) -> float:
        """What these cards add to the user's level while they are held."""
        return self._weight * self._ahead_h * cards / CARD / self.share_of(name)

    def share_of(self, name: str) -> float:
        shares = self.rules.shares
        return shares.get(name, shares.get("default", 1.0))

    def held(self, uid: int) -> Held:
        account = self.by_uid.get(uid)
        return NONE_HELD if account is None else account.held

    def waiting(self, uid: int) -> int:
        account = self.by_uid.get(uid)
        return 0 if account is None else account.waiting

    def saved(self, now: float) -> tuple[UserUsage, ...]:
        """Every account as of now, by uid; read-only."""
        found = []
        for uid, account in sorted(self.by_uid.items()):
            memory_h, sm_h = self.usage(account, now)
            if memory_h + sm_h >= NEGLIGIBLE_H:
                found.append(UserUsage(uid=uid, name=account.name, memory_h=memory_h, sm_h=sm_h))
        return tuple(found)

    def usage(self, account: Account, now: float) -> tuple[float, float]:
        """Card-hours of memory and of SM activity, as of now."""
        copy = Account(account.name)
        copy.memory_h, copy.since, copy.held = account.memory_h, account.since, account.held
        self._count(copy, now)
        worth = self._worth(now)
        return copy.memory_h / worth, account.sm_h / worth

    def load(self, saved: Iterable[UserUsage], now: float) -> None:
        """Load the accounts of a checkpoint of that time; before any task."""
        self.at = floor(now / MINUTE_S) * MINUTE_S
        worth = self._worth(now)
        for one in saved:
            account = self.by_uid[one.uid] = Account(one.name)
            account.memory_h, account.sm_h = one.memory_h * worth, one.sm_h * worth
            account.since = now


def waits(task: Task | None) -> bool:
    """Whether it counts as waiting. An attempt that has just ended does not: its retry is not decided yet."""
    match task.status if task is not None else None:
        case Estimating() | Queued() | Recovering():
            return True
        case _:
            return False


def wanted_by(ask: Ask, largest_mib: int) -> Held:
    """What a waiting task would hold, on cards of the largest size."""
    mib = largest_mib if ask.alone else ask.memory_mib
    cards = min(CARD, round(CARD * mib / largest_mib)) if largest_mib else CARD
    return Held(1, ask.gpus, mib * ask.gpus, cards * ask.gpus)
