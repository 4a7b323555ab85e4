"""Answers of `GET /report` (the work of a server over a period) and `GET /users` (use and limits of users).

All figures of a report are sums, so that reports can be added. The period begins on a full hour, because the use of
GPUs is stored by the hour.
"""

from __future__ import annotations

from carma.wire.api_types import Answer


class Work(Answer, frozen=True, kw_only=True):
    """Tasks over the period. Of attempts that extend beyond it, only the part within counts."""

    ended: dict[str, int] = {}  # outcome -> tasks that ended within the period
    running: int = 0  # tasks that run at its end
    started: int = 0  # tasks whose first attempt started within it
    waited_s: float = 0.0  # sum of their waiting times, from submission to start
    longest_wait_s: float = 0.0
    attempts: int = 0
    run_s: float = 0.0  # of attempts
    gpu_s: float = 0.0  # run time times GPUs
    energy_j: float = 0.0  # above idle
    unmeasured: int = 0  # attempts of unknown energy


class UserWork(Answer, frozen=True, kw_only=True):
    user: str
    uid: int
    work: Work


class GpuWork(Answer, frozen=True, kw_only=True):
    """One GPU over the observed part of the period."""

    gpu: str  # UUID
    index: int | None  # None: the GPU is gone
    name: str = ""
    watched_s: float = 0.0
    held_s: float = 0.0  # with at least one task
    shared_s: float = 0.0  # with two or more
    sm_active: float | None = None  # mean; None: not measured
    energy_j: float | None = None  # None: not measured
    idle_j: float = 0.0  # of that: idle
    tasks_j: float = 0.0  # of that: attributed to tasks
    power_w: float | None = None  # mean


class Report(Answer, frozen=True, kw_only=True):
    since: float
    until: float
    total: Work
    users: tuple[UserWork, ...] = ()  # most GPU time first
    gpus: tuple[GpuWork, ...] = ()
    notes: tuple[str, ...] = ()  # what the figures leave out


class UserView(Answer, frozen=True, kw_only=True):
    """Past use in GPU-hours, which decay with fairness.half_life_s, current use, and limits (None: no limit)."""

    user: str
    uid: int
    share: float = 1.0  # fairness.shares
    memory_h: float = 0.0  # booked memory in hours of a whole GPU's memory
    sm_h: float = 0.0  # SM activity in hours of a full GPU
    level: float = 0.0  # weighted past and current use divided by the share; tasks of the lowest level start first
    running: int = 0
    gpus: int = 0  # sum over running tasks
    booked_mib: int = 0
    waiting: int = 0
    running_limit: int | None = None
    gpus_limit: int | None = None
    memory_limit_mib: int | None = None
    waiting_limit: int | None = None
