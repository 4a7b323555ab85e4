"""A task, its attempts, and the plan for its next attempt."""

from __future__ import annotations

from typing import Literal

from carma.core.model.decision import Verdict
from carma.core.model.outcome import Outcome
from carma.core.model.status import Estimating, Finished, Paused, Running, Status
from carma.core.model.values import (
    Activity,
    Alone,
    AttemptKey,
    Confinement,
    Estimate,
    NoEstimate,
    NoticeKind,
    Owner,
    Placement,
    Record,
    StepProgress,
    TaskId,
    TaskSpec,
)


class Plan(Record, frozen=True, kw_only=True):
    """Recovery's decision for the next attempt. `rung` names the step of the ladder."""

    rung: Literal["again", "larger", "alone", "first"]
    memory_mib: int | None
    reason: str
    first: bool = False  # before all other tasks, because its last attempt ended through no fault of its own


class Relief(Record, frozen=True, kw_only=True):
    """What pauses of its neighbours have shown of a task that was measured to be slowed down."""

    since: float  # beginning of the hour in which `seconds` are counted
    seconds: float = 0.0  # for which neighbours were paused for it
    confirmed: bool = False  # it was faster in the last pause that tested it
    refuted: bool = False  # it was not


class Attempt(Record, frozen=True, kw_only=True):
    number: int
    placement: Placement
    placed_at: float
    decision: str = ""  # why these GPUs, in one sentence
    verdicts: tuple[Verdict, ...] = ()  # on each GPU at that time
    pid: int | None = None
    started_at: float | None = None
    observed_mib: int | None = None  # highest memory observed on any one of its GPUs
    ended_at: float | None = None
    outcome: Outcome | None = None
    blame: Literal["own", "neighbour", "unknown"] | None = None  # for an OOM on the GPU
    energy_j: float | None = None  # its share of the energy above idle
    activity: Activity | None = None  # its share, on average
    used_s: float = 0.0  # GPU-seconds since its first use, over which `activity` is the mean, as last stored
    alone: Alone | None = None  # estimated demand without neighbours, if known
    confinement: Confinement | None = None
    settled: bool = False  # on all of its GPUs, as last stored
    progress: StepProgress | None = None  # None: no step was counted
    paused_s: float = 0.0  # in all ended pauses
    paused_by_carma_s: float = 0.0  # of that
    paused_for: tuple[TaskId, ...] = ()  # slowed neighbours for which CARMA has paused it

    @property
    def own_energy_j(self) -> float | None:
        """None for attempts of old versions (without `used_s`), which were given all energy of their GPUs."""
        return self.energy_j if self.used_s > 0.0 else None


class Notice(Record, frozen=True):
    """Not sent yet. `at`: the time of the event; `attempt`: the newest one then, 0 if there was none."""

    kind: NoticeKind
    at: float
    attempt: int


class Task(Record, frozen=True, kw_only=True):
    id: TaskId
    owner: Owner
    spec: TaskSpec
    submitted_at: float
    status: Status
    estimate: Estimate | None = None
    no_estimate: tuple[NoEstimate, ...] = ()
    estimate_pending: bool = False  # it was placed before its estimate was there
    fingerprint: str = ""  # of the program's files at the estimate; "" if unknown
    attempts: tuple[Attempt, ...] = ()
    plan: Plan | None = None
    relief: Relief | None = None
    notices: tuple[Notice, ...] = ()  # to be sent
    retried_at: float | None = None  # by the user, the last time
    counted_from: int = 0  # recovery does not count attempts up to this number (before a retry by the user)

    @property
    def awaits_estimate(self) -> bool:
        return isinstance(self.status, Estimating) or (self.estimate_pending and not isinstance(self.status, Finished))

    @property
    def paused(self) -> Paused | None:
        return self.status.paused if isinstance(self.status, Running) else None

    def paused_s(self, now: float) -> float:
        """Seconds for which the newest attempt has stood still until now."""
        paused = self.paused
        return self.attempts[-1].paused_s + (0.0 if paused is None else max(0.0, now - paused.at))

    @property
    def key(self) -> AttemptKey:
        """Key of the newest attempt; attempt 0 if there was none."""
        return AttemptKey(self.id, self.attempts[-1].number if self.attempts else 0)
