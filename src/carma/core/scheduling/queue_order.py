"""The order of the queue: by priority and age, or with fair shares by the users' levels (fair_order.py).

A policy may put urgent tasks first (`Policy.urgent`). No task goes before one of a higher priority, and no task is
overtaken for ever: once the first in the queue was overtaken by `queue.overtakes` tasks, the order is that of age until
it starts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from carma.core.model.task import Task
from carma.core.model.values import TaskId
from carma.core.scheduling.eligibility import Eligibility
from carma.core.scheduling.fair_order import FairOrder, QueueKey
from carma.core.scheduling.policy import Waits
from carma.core.state import State


class UrgentOrder:
    """The keys of the queue, of which the first `urgent` go before their time; `first` is the first by age."""

    __slots__ = ("first", "keys", "urgent")

    def __init__(self, keys: list[QueueKey], urgent: int = 0, first: TaskId | None = None) -> None:
        self.keys = keys
        self.urgent = urgent
        self.first = first

    def overtaken_by(self, place: int) -> TaskId | None:
        """The task before which the one at that place goes."""
        return self.first if place < self.urgent and self.keys[place][2] != self.first else None


def urgent_first(state: State, keys: list[QueueKey], now: float) -> UrgentOrder:
    urgent, rules = state.policy.urgent, state.rules.queue
    if urgent is None or len(keys) < 2 or state.overtaken.get(keys[0][2], 0) >= rules.overtakes:
        return UrgentOrder(keys)
    window = [key for key in keys[: rules.backfill_depth] if key[:2] == keys[0][:2]]
    waiting = [_waits(state, key[2]) for key in window]
    if not any(waits.alone_s is not None for waits in waiting):
        return UrgentOrder(keys)
    if not urgent(waiting, 0.0, len(state.gpus)):  # the more running tasks still have to do, the fewer are urgent
        return UrgentOrder(keys)
    first = [window[place] for place in urgent(waiting, _running_s(state, now), len(state.gpus))]
    taken = set(first)
    return UrgentOrder([*first, *(key for key in keys if key not in taken)], len(first), keys[0][2] if first else None)


def overtaking(state: State, now: float) -> dict[TaskId, str]:
    """A phrase for each task that the policy puts first, and for the task before which they go."""
    if state.policy.urgent is None or state.fair_queue is not None:
        return {}
    order = urgent_first(state, state.queue, now)
    ahead = [key[2] for key in order.keys[: order.urgent]]
    if not ahead or order.first is None or ahead[0] == order.first:
        return {}
    lets = f"policy {state.policy.name} lets"
    return {**dict.fromkeys(ahead, f"{lets} it go first"), order.first: f"{lets} task {ahead[0]} go first"}


def _waits(state: State, task_id: TaskId) -> Waits:
    task = state.tasks.get(task_id)
    if task is None:  # a task that is only tried
        return Waits(1, None)
    return Waits(task.spec.gpus, task.estimate.runtime_s if task.estimate is not None else None)


def _running_s(state: State, now: float) -> float:
    """GPU seconds that the running tasks would still need alone."""
    total_s, assumed_s = 0.0, state.rules.queue.assumed_runtime_s
    for key in state.active.values():
        track = state.tracks[key]
        left_s = (assumed_s if track.alone_s is None else track.alone_s) - track.done_by(now)
        total_s += max(0.0, left_s) * len(track.on)
    return total_s


def key_of_new(state: State, task: Task) -> QueueKey:
    """Sort key of a task that is not in the queue yet: it comes after all tasks of its priority."""
    return (1, -task.spec.priority, TaskId(max(state.tasks, default=0) + 1))


def queued_tasks(
    state: State, now: float, eligibility: Eligibility, extra: Task | None = None, *, skip_stopped: bool = False
) -> Iterator[tuple[Task, bool]]:
    """Every queued task in order, with whether it may start. `extra`: a task that is not in the queue yet.

    `skip_stopped`: with fair shares, leave out the tasks behind one that has reached its user's quota.
    """
    keys, tasks, fair = state.queue, state.tasks, state.fair_queue
    if extra is not None:
        key = key_of_new(state, extra)
        tasks = {**tasks, key[2]: extra}
        if fair is None:
            keys = keys.copy()
            insort(keys, key)
        else:
            fair = fair.with_one_more(key, extra.owner.uid, state.accounts.level(extra.owner.uid))
    if fair is None:
        order = urgent_first(state, keys, now)
        for place, (_, _, task_id) in enumerate(order.keys):
            eligibility.overtaken = order.overtaken_by(place)
            yield tasks[task_id], eligibility.may_start(tasks[task_id], now)
        return
    by_level = FairOrder(fair, lambda task_id: eligibility.cost(tasks[task_id]))
    for _, _, task_id in by_level:
        task = tasks[task_id]
        may_start = eligibility.may_start(task, now)
        if not may_start:
            by_level.passed_over()
            if skip_stopped and eligibility.quota.has_stopped(task.owner):
                by_level.leave_out(task.owner.uid)
        yield task, may_start


def queued_ids(state: State, now: float) -> Iterable[TaskId]:
    """The whole queue in order."""
    if state.fair_queue is None:
        return [task_id for _, _, task_id in urgent_first(state, state.queue, now).keys]
    return (task.id for task, _ in queued_tasks(state, now, Eligibility(state)))


def tasks_before(state: State, task: Task, now: float) -> int:
    """How many queued tasks are before one that is not in the queue yet."""
    if state.fair_queue is None:
        return bisect_left(state.queue, key_of_new(state, task))
    queue = enumerate(queued_tasks(state, now, Eligibility(state), task))
    return next(place for place, (found, _) in queue if found is task)
