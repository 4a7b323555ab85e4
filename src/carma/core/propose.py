"""The events that are due now. The shell commits them, steps them and asks again until there are none."""

from __future__ import annotations

from carma.core import preemption as preempt
from carma.core.model.events import Durable, RecoveryDue, RecoveryPlanned, StopRequested, TaskFinished, TaskWarned
from carma.core.model.outcome import Cancelled, NeverFits, Outcome, TimedOut, describe_to_others, satisfied
from carma.core.model.status import Estimating, Finished, Pending, Queued, Recovering, Running
from carma.core.model.task import Task
from carma.core.model.values import TaskId
from carma.core.recovery import GiveUp, next_step
from carma.core.scheduling.feasibility import by_size, never_fits
from carma.core.scheduling.news import in_order
from carma.core.scheduling.queue_order import schedule
from carma.core.state import State
from carma.core.telemetry import watchdog
from carma.core.telemetry.booking_shrink import shrinks
from carma.core.telemetry.observation import to_store


def propose(state: State, now: float) -> list[Durable]:
    state.now = max(state.now, now)
    news = state.news
    due: list[Durable] = []
    due.extend(watchdog.stops(state, now))
    if state.between_attempts:
        due.extend(_ends_and_recoveries(state, now))
    limits = _limits(state, now)
    if limits:
        stopped = {event.task for event in due if isinstance(event, StopRequested)}
        due.extend(event for event in limits if event.task not in stopped)
    if state.asked:
        due.extend(preempt.stayed(state, now))
    if news.ended or state.unfitted:
        due.extend(_impossible(state, now))
    if news.grown:
        due.extend(to_store(state, now))
    if news.settled:
        due.extend(shrinks(state, now))
    # Placements come alone: what is above may free a GPU, move the line or end a task.
    # And nobody is asked to make room while somebody can start as things are.
    return due or list(schedule(state, now)) or list(preempt.asks(state, now))


def _ends_and_recoveries(state: State, now: float) -> list[Durable]:
    due: list[Durable] = []
    for task_id in sorted(state.between_attempts):
        task = state.tasks[task_id]
        if isinstance(task.status, Recovering):
            if task.status.until <= now:
                state.unfitted.add(task_id)
                due.append(RecoveryDue(now, task_id))
            continue
        answer = next_step(task, state.rules, by_size(state))
        if isinstance(answer, GiveUp):
            due.append(TaskFinished(now, task_id, answer.outcome))
        else:
            due.append(RecoveryPlanned(now, task_id, answer.plan, now + answer.wait_s))
    return due


def _limits(state: State, now: float) -> list[StopRequested | TaskWarned]:
    """Time limits reached, and the warning signals that go before them."""
    due: list[StopRequested | TaskWarned] = []
    ripe = state.news.ripen(now)
    if not ripe:
        return due
    for task_id in in_order(ripe, state.active):
        event = limit_reached(state, state.tasks[task_id], now)
        if event is not None:
            due.append(event)
    for task_id in ripe - {event.task for event in due}:
        state.news.not_ripe(state.tasks.get(task_id), task_id, now)
    return due


def limit_reached(state: State, task: Task, now: float) -> StopRequested | TaskWarned | None:
    status, limit_s = task.status, task.spec.time_limit_s
    if limit_s is None or not isinstance(status, Running) or status.ending is not None:
        return None
    left_s = status.since + limit_s - now
    warn = task.spec.warn
    if left_s <= 0:
        return StopRequested(now, task.id, TimedOut(limit_s), state.rules.stopping.grace_of(task.spec))
    if warn is not None and not status.warned and left_s <= warn.before_s:
        return TaskWarned(now, task.id, warn.signal)
    return None


def _impossible(state: State, now: float) -> list[Durable]:
    """Waiting tasks that can never start: a dependency ended the wrong way, or the GPUs are no longer there."""
    due: list[Durable] = []
    if state.news.ended:
        broken_off = {
            task_id: in_vain(state, task_id, now) for task_id in in_order(state.news.ended, state.waiting_for)
        }
        state.news.ended = {task_id for task_id, events in broken_off.items() if events}  # until they are finished
        due.extend(event for events in broken_off.values() for event in events)
    if state.unfitted and state.gpus:
        impossible = _outgrown(state, now) if state.rules.queue.misfits == "end" else []
        state.unfitted = {event.task for event in impossible}  # until they are finished
        due.extend(impossible)
    return due


def in_vain(state: State, task_id: TaskId, now: float) -> list[TaskFinished]:
    """Those that wait for that task and need not."""
    due: list[TaskFinished] = []
    other = state.tasks.get(task_id)
    if other is None or not isinstance(other.status, Finished):
        return due
    for waiting_id in sorted(state.waiting_for[task_id]):
        reason = broken(state.tasks[waiting_id], other, other.status.outcome)
        if reason is not None:
            due.append(TaskFinished(now, waiting_id, Cancelled("carma", reason)))
    return due


def _outgrown(state: State, now: float) -> list[TaskFinished]:
    """Tasks that fitted when they were submitted, to a server that now has smaller or fewer GPUs."""
    due: list[TaskFinished] = []
    gpus = by_size(state)
    for task_id in sorted(state.unfitted & state.tasks.keys()):
        task = state.tasks[task_id]
        reason = never_fits(state, task.spec, gpus)
        if reason is not None and isinstance(task.status, Pending):
            due.append(TaskFinished(now, task_id, NeverFits(reason)))
    return due


def broken(task: Task, other: Task, outcome: Outcome) -> str | None:
    if not isinstance(task.status, Queued | Estimating):
        return None
    for dependency in task.spec.after:
        if dependency.task == other.id and not satisfied(dependency, outcome):
            return f"it waited for task {other.id} ({dependency.when}), which {describe_to_others(outcome)}"
    return None
