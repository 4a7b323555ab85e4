"""A task with all that happened to it."""

from __future__ import annotations

from typing import Literal

from carma.core.model.outcome import Outcome
from carma.core.model.status import Status
from carma.core.model.values import (
    Activity,
    Alone,
    AttemptKey,
    Confinement,
    Estimate,
    NoEstimate,
    Owner,
    Placement,
    Record,
    TaskId,
    TaskSpec,
)
from carma.core.scheduling.decision import Verdict


class Plan(Record, frozen=True, kw_only=True):
    """What recovery decided for the next attempt. `rung` names the step of the ladder, `reason` tells the story."""

    rung: Literal["again", "larger", "alone", "first"]
    memory_mib: int | None
    reason: str
    first: bool = False  # an innocent victim goes before the others


class Attempt(Record, frozen=True, kw_only=True):
    number: int
    placement: Placement
    placed_at: float
    decision: str = ""  # the sentence that says why these GPUs
    verdicts: tuple[Verdict, ...] = ()  # what was thought of each GPU then
    pid: int | None = None
    started_at: float | None = None
    observed_mib: int | None = None  # most seen on any one of its GPUs
    ended_at: float | None = None
    outcome: Outcome | None = None
    blame: Literal["own", "neighbour", "unknown"] | None = None  # for an OOM on the GPU
    energy_j: float | None = None  # its share above what the idle GPUs would have taken
    activity: Activity | None = None  # its own share, on average
    used_s: float = 0.0  # what `activity` is the mean over, as last stored: GPU-seconds since its first use
    alone: Alone | None = None  # what it would have shown alone, as far as that can be told
    confinement: Confinement | None = None
    settled: bool = False  # on all of its GPUs, as last stored

    @property
    def own_energy_j(self) -> float | None:
        """None where it was not measured as it is now: before there was `used_s`, an attempt was given all that its
        GPUs took, which cannot be added to shares of it."""
        return self.energy_j if self.used_s > 0.0 else None


class Task(Record, frozen=True, kw_only=True):
    id: TaskId
    owner: Owner
    spec: TaskSpec
    submitted_at: float
    status: Status
    estimate: Estimate | None = None
    no_estimate: tuple[NoEstimate, ...] = ()
    fingerprint: str = ""  # of what it runs, as it was when it was estimated; "" where nobody looked
    attempts: tuple[Attempt, ...] = ()
    plan: Plan | None = None
    counted_from: int = 0  # attempts up to this number were before a retry by hand; recovery does not count them

    @property
    def key(self) -> AttemptKey:
        """The newest attempt's key; attempt 0 when there was none."""
        return AttemptKey(self.id, self.attempts[-1].number if self.attempts else 0)
