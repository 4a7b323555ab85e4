"""What `GET /report` answers: a server's work over a span. Sums, so that whoever reads it can add them up.

The span begins on a full hour, because GPUs are recorded by the hour; so tasks and GPUs tell of the same time.
"""

from __future__ import annotations

from carma.wire.api_types import Answer


class Work(Answer, frozen=True, kw_only=True):
    """Tasks over a span. Attempts that reach beyond it count with the part that lies within."""

    ended: dict[str, int] = {}  # outcome -> tasks that ended within the span
    running: int = 0  # tasks that run at its end
    started: int = 0  # tasks whose first attempt started within it
    waited_s: float = 0.0  # of those, from submission to that start, summed
    longest_wait_s: float = 0.0
    attempts: int = 0
    run_s: float = 0.0  # of attempts
    gpu_s: float = 0.0  # the same, times their GPUs
    energy_j: float = 0.0  # above what the idle GPUs would have taken
    unmeasured: int = 0  # attempts whose energy is not known


class UserWork(Answer, frozen=True, kw_only=True):
    user: str
    uid: int
    work: Work


class GpuWork(Answer, frozen=True, kw_only=True):
    """One GPU over the span, as far as it was watched."""

    gpu: str  # UUID
    index: int | None  # None: it is no longer here
    name: str = ""
    watched_s: float = 0.0
    held_s: float = 0.0  # with at least one task
    shared_s: float = 0.0  # with two or more
    sm_active: float | None = None  # the mean while watched; None where the GPU does not give it
    energy_j: float | None = None  # None where the GPU does not give it
    idle_j: float = 0.0  # of that: what it takes with nobody on it
    tasks_j: float = 0.0  # of that: given to tasks
    power_w: float | None = None  # the mean while watched


class Report(Answer, frozen=True, kw_only=True):
    since: float
    until: float
    total: Work
    users: tuple[UserWork, ...] = ()  # most GPU time first
    gpus: tuple[GpuWork, ...] = ()
    notes: tuple[str, ...] = ()  # what is not in these figures
