"""The events that are due now. The shell commits them, steps them and asks again until there are none.

Read-only: what is proposed changes the state only when `machine.step` gets it.
"""

from __future__ import annotations

from itertools import takewhile

from carma.core import preemption as preempt
from carma.core import undo
from carma.core.model.events import (
    Durable,
    NoticeDue,
    RecoveryDue,
    RecoveryPlanned,
    StopRequested,
    TaskFinished,
    TaskWarned,
)
from carma.core.model.outcome import TimedOut
from carma.core.model.status import Recovering, Running
from carma.core.model.task import Task
from carma.core.model.values import TaskId
from carma.core.recovery import GiveUp, next_step
from carma.core.scheduling.scheduling_pass import schedule
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import EARLY_S, State, in_order
from carma.core.telemetry import idle, watchdog
from carma.core.telemetry.booking_shrink import shrinks
from carma.core.telemetry.observation import to_store


def propose(state: State, now: float, cache: VerdictCache | None = None) -> list[Durable]:
    """`cache` saves work from one call to the next, and makes no other difference."""
    due: list[Durable] = []
    due.extend(watchdog.stops(state, now))
    due.extend(_ends_and_recoveries(state, now))
    due.extend(idle.events(state, now))
    stopped = {event.task for event in due if isinstance(event, StopRequested)}
    due.extend(event for event in _limits(state, now) if event.task not in stopped)
    due.extend(preempt.stayed(state, now))
    due.extend(undo.ends(state, now))
    due.extend(TaskFinished(now, task_id, outcome) for task_id, outcome in sorted(state.impossible.items()))
    due.extend(to_store(state, now))
    due.extend(shrinks(state, now))
    due.extend(_long_waits(state, now))
    # Placements come alone: the events above may free a GPU, change the order of the queue or end a task.
    # No task is asked to make room while a waiting task can start without that.
    return due or list(schedule(state, now, cache)) or _changes_of_running_tasks(state, now, cache)


def _changes_of_running_tasks(state: State, now: float, cache: VerdictCache | None) -> list[Durable]:
    return [*undo.starts(state, now)] or [*preempt.asks(state, now, cache)]


def _ends_and_recoveries(state: State, now: float) -> list[Durable]:
    due: list[Durable] = []
    for task_id in sorted(state.between_attempts):
        task = state.tasks[task_id]
        if isinstance(task.status, Recovering):
            due.extend([RecoveryDue(now, task_id)] if task.status.until <= now else [])
            continue
        answer = next_step(task, state.rules, state.usable)
        if isinstance(answer, GiveUp):
            due.append(TaskFinished(now, task_id, answer.outcome))
        else:
            due.append(RecoveryPlanned(now, task_id, answer.plan, now + answer.wait_s))
    return due


def _limits(state: State, now: float) -> list[StopRequested | TaskWarned]:
    """Time limits reached, and the warning signals that go before them."""
    ids = in_order(_near(state, now), state.active)
    events = (limit_reached(state, state.tasks[task_id], now) for task_id in ids)
    return [event for event in events if event is not None]


def _near(state: State, now: float) -> set[TaskId]:
    """The tasks with a deadline that has come."""
    near = takewhile(lambda deadline: deadline[0] - EARLY_S <= now, state.deadlines)
    return {task_id for _, task_id in near}


def _long_waits(state: State, now: float) -> list[NoticeDue]:
    return [NoticeDue(now, task_id) for task_id in sorted(_near(state, now)) if task_id not in state.active]


def limit_reached(state: State, task: Task, now: float) -> StopRequested | TaskWarned | None:
    status, limit_s = task.status, task.spec.time_limit_s
    if limit_s is None or not isinstance(status, Running) or status.ending is not None or status.paused is not None:
        return None
    left_s = status.since + task.attempts[-1].paused_s + limit_s - now
    warn = task.spec.warn
    if left_s <= 0:
        return StopRequested(now, task.id, TimedOut(limit_s), state.rules.stopping.grace_of(task.spec))
    if warn is not None and not status.warned and left_s <= warn.before_s:
        return TaskWarned(now, task.id, warn.signal)
    return None
