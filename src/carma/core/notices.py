"""Notices: which events of a task its user, or the administrator, wants to be told of.

`machine.step` records a notice in the task together with the event, so that a restart does not lose it. The shell sends
it and reports that with NoticeSent. Each event gives one notice at most.
"""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.outcome import Cancelled, Outcome, OutOfMemory, Succeeded
from carma.core.model.settings import NotifyRules
from carma.core.model.status import Queued
from carma.core.model.task import Notice, Task
from carma.core.model.values import NoticeKind


def wants(task: Task, kind: NoticeKind, rules: NotifyRules) -> bool:
    own = task.spec.notify
    return (own is not None and kind in own.on) or kind in rules.server_kinds


def with_notice(task: Task, kinds: tuple[NoticeKind, ...], at: float, rules: NotifyRules) -> Task:
    """The task with a notice of the first of these kinds that is wanted."""
    wanted = next((kind for kind in kinds if wants(task, kind, rules)), None)
    if wanted is None:
        return task
    return replace(task, notices=(*task.notices, Notice(wanted, at, task.key.attempt)))


def kinds_of_end(task: Task, outcome: Outcome) -> tuple[NoticeKind, ...]:
    """A user who cancels a task knows of its end."""
    match outcome:
        case Succeeded():
            return ("finish",)
        case OutOfMemory():
            return ("oom", "failure")
        case Cancelled(by=by) if by == task.owner.name:
            return ()
        case _:
            return ("failure",)


def kinds_of_retry(task: Task) -> tuple[NoticeKind, ...]:
    return ("oom", "retry") if isinstance(task.attempts[-1].outcome, OutOfMemory) else ("retry",)


def without_notice(task: Task, kind: NoticeKind, at: float) -> Task:
    left = tuple(notice for notice in task.notices if (notice.kind, notice.at) != (kind, at))
    return replace(task, notices=left)


def long_wait_at(task: Task, rules: NotifyRules) -> float | None:
    """When the notice of a long wait is due; None: never."""
    status = task.status
    if not isinstance(status, Queued) or status.held or status.wait_noted or not wants(task, "wait", rules):
        return None
    return status.since + rules.wait_s
