"""What each user has had of the GPUs, and holds now: the accounts that turns (lanes.py) and quotas (quota.py) go by.

In card-hours: a whole card's memory booked for an hour, a whole card's SM activity seen for an hour. Both fade with a
half-life, by the time of events; there is no clock here. Memory is counted when what a user holds changes, SM activity
when the log is told of it (UseNoted, MemoryObserved, AttemptEnded): never at a sample. A user's level is what the order
goes by. It changes only when one of the user's tasks comes, goes or is noted, and for all of them with the minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, log
from typing import NamedTuple

from carma.core.model.settings import FairnessRules, QuotaRules, Rules
from carma.core.model.status import Estimating, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.values import Gpu, GpuId, Placement, Record, TaskId
from carma.core.scheduling.decision import Ask

HOUR_S = 3600.0
MINUTE_S = 60.0  # so often all levels are worked out again; at full minutes, so that every replay does it then
CARD = 1_000_000  # a whole card. Whole numbers: what comes and goes for months leaves no rest
NOTHING_H = 1e-6
_FAR = 1000.0  # half-lives; further back there is nothing


class UserUsage(Record, frozen=True, kw_only=True):
    """One user's account for the store, as of the checkpoint's time."""

    uid: int
    name: str
    memory_h: float = 0.0
    sm_h: float = 0.0


class Held(NamedTuple):
    """What one running task holds, or what a user's hold together."""

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
    """Of one user. The hours are as of the accounts' `at`: what came later is worth more by what has faded since."""

    __slots__ = ("held", "memory_h", "name", "since", "sm_h", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory_h = 0.0  # up to `since`
        self.sm_h = 0.0
        self.since = 0.0
        self.held = NONE_HELD
        self.waiting = 0  # tasks that are neither running nor finished


def held_by(placement: Placement, gpus: Mapping[GpuId, Gpu]) -> Held:
    """One that is alone on its GPUs holds all of them, and so does one whose GPU is no longer there."""
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
    """SM activity times time, of its newest attempt, as far as it is on record; what nobody saw is not counted."""
    if not task.attempts:
        return 0.0
    seen = task.attempts[-1]
    active = seen.activity.sm_active if seen.activity is not None else None
    return 0.0 if active is None else active * seen.used_s


class Accounts:
    def __init__(self, rules: Rules) -> None:
        self.rules: FairnessRules = rules.fairness
        # What is held counts as if it were held so much longer: without that, whoever comes first to an empty server
        # takes all of it, and is asked to stand back only afterwards.
        self._ahead_h = rules.queue.assumed_runtime_s / HOUR_S
        self._weight = self.rules.memory_weight + self.rules.sm_weight
        self.limited = rules.quota != QuotaRules()
        self.at = 0.0
        self.by_uid: dict[int, Account] = {}
        self.by_task: dict[TaskId, Held] = {}
        self._gpus: Mapping[GpuId, Gpu] = {}  # those that were there last
        self._outdated: set[TaskId] = set()  # what those hold was counted on other GPUs

    # -- what happens ------------------------------------------------------------------------------------------------
    def follow(self, before: Task | None, task: Task | None, gpus: Mapping[GpuId, Gpu], now: float) -> bool:
        """One task as it was and as it is. Whether its user's level has changed."""
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
            if more_s != 0.0:  # a mean that is rounded may also take a little back
                account.sm_h += more_s / HOUR_S * self._worth(now)
                changed = True
        return changed

    def _hold(self, account: Account, task_id: TaskId, task: Task | None, now: float) -> bool:
        """What it holds now. Whether that is something else than before."""
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
        """With every full minute all is counted up to then, and fades. Whether that was due."""
        at = floor(now / MINUTE_S) * MINUTE_S
        if at <= self.at:
            return False
        worth = self._worth(at)
        for uid, account in list(self.by_uid.items()):
            self._count(account, at)
            account.memory_h /= worth
            account.sm_h /= worth
            if not account.waiting and not account.held.tasks and account.memory_h + account.sm_h < NOTHING_H:
                del self.by_uid[uid]
        self.at = at
        return True

    def _worth(self, at: float) -> float:
        """Of one hour at that time, in hours as of `self.at`."""
        return float(2.0 ** min((at - self.at) / self.rules.half_life_s, _FAR))

    def _count(self, account: Account, now: float) -> None:
        """The memory that was held since the last time. The integral, so that it does not matter how often."""
        if account.held.cards and now > account.since:
            spread_h = self.rules.half_life_s / log(2.0) / HOUR_S
            span_h = spread_h * (self._worth(now) - self._worth(account.since))
            account.memory_h += account.held.cards / CARD * span_h
        account.since = max(account.since, now)

    # -- what is asked -----------------------------------------------------------------------------------------------
    def level(self, uid: int) -> float:
        """What the user had and holds, for their share: the lower, the earlier their turn."""
        account = self.by_uid.get(uid)
        if account is None:
            return 0.0
        had = self.rules.memory_weight * account.memory_h + self.rules.sm_weight * account.sm_h
        return had / self.share_of(account.name) + self.level_of_held(account.name, account.held.cards)

    def level_of_held(self, name: str, cards: int) -> float:
        """What holding so much of cards adds to a user's level."""
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

    def kept(self, now: float) -> tuple[UserUsage, ...]:
        """Every account as of now, by uid. Nothing is changed."""
        found = []
        for uid, account in sorted(self.by_uid.items()):
            memory_h, sm_h = self.usage(account, now)
            if memory_h + sm_h >= NOTHING_H:
                found.append(UserUsage(uid=uid, name=account.name, memory_h=memory_h, sm_h=sm_h))
        return tuple(found)

    def usage(self, account: Account, now: float) -> tuple[float, float]:
        """Card-hours of memory and of SM activity, as of now."""
        seen = Account(account.name)
        seen.memory_h, seen.since, seen.held = account.memory_h, account.since, account.held
        self._count(seen, now)
        worth = self._worth(now)
        return seen.memory_h / worth, account.sm_h / worth

    def load(self, kept: Iterable[UserUsage], now: float) -> None:
        """What a checkpoint of that time has; before any task is followed."""
        self.at = floor(now / MINUTE_S) * MINUTE_S
        worth = self._worth(now)
        for one in kept:
            account = self.by_uid[one.uid] = Account(one.name)
            account.memory_h, account.sm_h = one.memory_h * worth, one.sm_h * worth
            account.since = now


def waits(task: Task | None) -> bool:
    """Whether it counts as waiting. Of one that has just ended nobody knows yet whether it comes back."""
    match task.status if task is not None else None:
        case Estimating() | Queued() | Recovering():
            return True
        case _:
            return False


def wanted_by(ask: Ask, largest_mib: int) -> Held:
    """What a waiting task would hold, on cards as large as the largest."""
    mib = largest_mib if ask.alone else ask.memory_mib
    cards = min(CARD, round(CARD * mib / largest_mib)) if largest_mib else CARD
    return Held(1, ask.gpus, mib * ask.gpus, cards * ask.gpus)
