"""Fairness between users. Pure.

Finish-time fairness compares a task's completion with its completion on a private share of the server: with n users
and G GPUs, G/n GPUs, which may be a fraction of one. The user's own tasks get them in the order of arrival, and a task
that gets less than it requested is slower in proportion. Above 1 sharing cost the user time; below 1 it saved time.
Themis (NSDI 2020) defines this for one task. Here the user's own queue is included, so a user who submits more work
than a share can do does not count as treated unfairly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from carma.core.model.values import Record
from carma_lab.runs.figures import TaskRun, mean

_NOTHING = 1e-9  # of a GPU, or of a second


class UserShare(Record, frozen=True, kw_only=True):
    user: str
    tasks: int
    gpu_s: float  # of all attempts
    wait_mean_s: float
    completion_mean_s: float
    slowdown_mean: float | None
    finish_time_mean: float | None  # mean of completion over completion on a private share
    finish_time_max: float | None


class Fairness(Record, frozen=True, kw_only=True):
    """Jain's index over users: 1 if all have the same, 1/n if one user has everything. None: not known."""

    users: tuple[UserShare, ...]  # by name
    jain_finish_time: float | None
    jain_slowdown: float | None
    jain_service: float | None  # of GPU time held
    finish_time_max: float | None  # of the worst task


def fairness(tasks: Sequence[TaskRun], gpus: int) -> Fairness | None:
    """None with fewer than two users."""
    by_user: dict[str, list[TaskRun]] = {}
    for task in tasks:
        by_user.setdefault(task.user, []).append(task)
    if len(by_user) < 2:
        return None
    share = gpus / len(by_user)
    users = tuple(_user(name, by_user[name], share) for name in sorted(by_user))
    worst = [user.finish_time_max for user in users if user.finish_time_max is not None]
    return Fairness(
        users=users,
        jain_finish_time=jain([user.finish_time_mean for user in users]),
        jain_slowdown=jain([user.slowdown_mean for user in users]),
        jain_service=jain([user.gpu_s for user in users]),
        finish_time_max=max(worst, default=None),
    )


def jain(values: Sequence[float | None]) -> float | None:
    """(Σx)² / (n · Σx²). None if a value is not known or all are 0."""
    known = [value for value in values if value is not None]
    squares = sum(value * value for value in known)
    if len(known) < len(values) or not squares:
        return None
    return sum(known) ** 2 / (len(known) * squares)


def _user(name: str, tasks: Sequence[TaskRun], share: float) -> UserShare:
    slowdowns = [task.slowdown for task in tasks if task.slowdown is not None]
    ratios = finish_times(tasks, share)
    return UserShare(
        user=name,
        tasks=len(tasks),
        gpu_s=sum(len(one.gpus) * (one.ended_at - one.placed_at) for task in tasks for one in task.attempts),
        wait_mean_s=mean([max(0.0, task.wait_s) for task in tasks]),
        completion_mean_s=mean([task.ended_s - task.arrival_s for task in tasks]),
        slowdown_mean=mean(slowdowns) if slowdowns else None,
        finish_time_mean=mean(ratios) if ratios else None,
        finish_time_max=max(ratios, default=None),
    )


def finish_times(tasks: Sequence[TaskRun], share: float) -> list[float]:
    """Finish-time fairness of each task that succeeded: its completion divided by its completion on `share` private
    GPUs.

    Empty if the duration alone of any task is not known, because the wait of the others depends on it.
    """
    ordered = sorted(tasks, key=lambda task: (task.arrival_s, task.task))
    alone = [task.alone_s for task in ordered if task.alone_s is not None]
    if len(alone) < len(ordered):
        return []
    ends = on_a_share([(task.arrival_s, task.gpus, s) for task, s in zip(ordered, alone, strict=True)], share)
    return [
        (task.ended_s - task.arrival_s) / max(end - task.arrival_s, _NOTHING)
        for task, end in zip(ordered, ends, strict=True)
        if task.outcome == "succeeded"
    ]


def on_a_share(work: Sequence[tuple[float, int, float]], share: float) -> list[float]:
    """End of each (arrival, GPUs, seconds alone) on `share` GPUs, in the order of arrival."""
    ends = [0.0] * len(work)
    left = [seconds for _, _, seconds in work]
    present: deque[int] = deque()  # in the order of arrival
    now, coming = 0.0, 0
    while present or coming < len(work):
        now = now if present else max(now, work[coming][0])
        while coming < len(work) and work[coming][0] <= now:
            present.append(coming)
            coming += 1
        served = _served(work, present, share)
        done_at = {place: now + left[place] / rate for place, rate in served.items()}
        next_arrival = [work[coming][0]] if coming < len(work) else []
        until = min([*done_at.values(), *next_arrival])
        for place, rate in served.items():
            left[place] -= rate * (until - now)
            ends[place] = until
        present.extendleft(reversed([place for place in served if done_at[place] > until]))
        now = until
    return ends


def _served(work: Sequence[tuple[float, int, float]], present: deque[int], share: float) -> dict[int, float]:
    """Removes the tasks from the front that get a part of the share, with their speeds."""
    served = {}
    while present and share > _NOTHING:
        place = present.popleft()
        taken = min(share, float(work[place][1]))
        share -= taken
        served[place] = taken / work[place][1]
    return served
