"""How evenly users were served. Pure.

Finish-time fairness goes by what each user would have had on a part of the server of their own: with n users and
G GPUs that is G/n GPUs, which may be a fraction of one, and the user's own tasks take them in the order of arrival. A
task that gets less than it asked for goes slower in proportion. Above 1: sharing cost the user time; below 1: it gained
some. (Themis, NSDI 2020, has the idea for one task; with the user's own queue in it, nobody is called unfairly treated
who submitted more than a share can do.)
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
    gpu_s: float  # held, in all attempts
    wait_mean_s: float
    completion_mean_s: float
    slowdown_mean: float | None
    finish_time_mean: float | None  # of completion over completion on a share of their own, over the user's tasks
    finish_time_max: float | None


class Fairness(Record, frozen=True, kw_only=True):
    """Jain's index over users: 1 where all have the same, 1/n where one has everything. None: not known."""

    users: tuple[UserShare, ...]  # by name
    jain_finish_time: float | None
    jain_slowdown: float | None
    jain_service: float | None  # of GPU time held
    finish_time_max: float | None  # of the task that is worst off


def fairness(tasks: Sequence[TaskRun], gpus: int) -> Fairness | None:
    """None with fewer than two users: there is nobody to be fair to."""
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
    """(Σx)² / (n · Σx²). None where a value is not known, or all are 0."""
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
    """Of each task that succeeded: its completion over its completion on `share` GPUs that no other user has.

    Empty where a task's run alone is not known: what the others would have waited for it is not known either.
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
    """When each (arrival, GPUs, seconds alone) would end on `share` GPUs. Who came first is served first."""
    ends = [0.0] * len(work)
    left = [seconds for _, _, seconds in work]
    here: deque[int] = deque()  # in the order of arrival
    now, coming = 0.0, 0
    while here or coming < len(work):
        now = now if here else max(now, work[coming][0])
        while coming < len(work) and work[coming][0] <= now:
            here.append(coming)
            coming += 1
        served = _served(work, here, share)
        done_at = {place: now + left[place] / rate for place, rate in served.items()}
        next_arrival = [work[coming][0]] if coming < len(work) else []
        until = min([*done_at.values(), *next_arrival])
        for place, rate in served.items():
            left[place] -= rate * (until - now)
            ends[place] = until
        here.extendleft(reversed([place for place in served if done_at[place] > until]))
        now = until
    return ends


def _served(work: Sequence[tuple[float, int, float]], here: deque[int], share: float) -> dict[int, float]:
    """Takes those from the front that get a part of the share, each with its speed."""
    served = {}
    while here and share > _NOTHING:
        place = here.popleft()
        taken = min(share, float(work[place][1]))
        share -= taken
        served[place] = taken / work[place][1]
    return served
