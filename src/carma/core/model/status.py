"""The status of a task: a tagged union. Each status has its own data."""

from __future__ import annotations

from carma.core.model.outcome import Cancelled, Disrupted, Outcome, OutOfMemory, TimedOut
from carma.core.model.values import IdleAction, Placement, Record, TaskId

# Why a running attempt is stopped. OutOfMemory: by the watchdog, before it takes memory that others booked.
Ending = Cancelled | TimedOut | OutOfMemory | Disrupted


def effective_ending(before: Ending | None, asked: Ending) -> Ending:
    """The first of two requests to stop. A user's cancellation replaces a stop that recovery would retry."""
    by_user = isinstance(asked, Cancelled) and isinstance(before, OutOfMemory | Disrupted)
    return asked if before is None or by_user else before


class Preempting(Record, frozen=True, kw_only=True):
    """A request to a running attempt to save a checkpoint and leave. The attempt goes on if it does not leave."""

    at: float
    until: float  # end of the grace period
    signal: int
    by: str
    reason: str = ""
    hold: bool = False  # whether the task is held when it returns to the queue
    room_for: TaskId | None = None  # the waiting task that is to start in its place


class Paused(Record, frozen=True, kw_only=True):
    """The processes of a running attempt stand still. It keeps its memory and its booking."""

    at: float
    by: str
    reason: str = ""
    until: float | None = None  # at the latest; None: until its user continues it
    slowed: TaskId | None = None  # the neighbour for which CARMA paused it; None: a user did
    slowdown: float | None = None  # of that neighbour, before the pause


class Idle(Record, frozen=True):
    """The attempt holds memory and has not used the SMs since `since`; noticed at `at`. `pack`: its activity counts as
    nothing. `end`: it is ended unless it uses them again."""

    since: float
    at: float
    action: IdleAction


class Estimating(Record, frozen=True, tag="estimating", tag_field="state"):
    since: float
    held: bool = False


class Queued(Record, frozen=True, tag="queued", tag_field="state"):
    since: float
    held: bool = False
    wait_noted: bool = False  # whether its user was to be notified of this long wait


class Starting(Record, frozen=True, tag="starting", tag_field="state"):
    """Placed and booked. The launcher has the order; the process was not observed yet."""

    since: float
    placement: Placement
    ending: Ending | None = None


class Running(Record, frozen=True, tag="running", tag_field="state"):
    since: float
    placement: Placement
    pid: int
    ending: Ending | None = None
    warned: bool = False
    preempting: Preempting | None = None
    paused: Paused | None = None
    idle: Idle | None = None
    stayed_at: float | None = None  # end of the last grace period in which it did not leave


class Ended(Record, frozen=True, tag="ended", tag_field="state"):
    """The newest attempt has ended. Recovery has not yet decided between a retry and the end of the task."""

    at: float
    outcome: Outcome
    held: bool = False  # whether the task is held if it goes back to the queue


class Recovering(Record, frozen=True, tag="recovering", tag_field="state"):
    """Waits for a retry: returns to the queue at `until` with the task's plan."""

    since: float  # the end of the attempt
    until: float
    held: bool = False


class Finished(Record, frozen=True, tag="finished", tag_field="state"):
    at: float
    outcome: Outcome


Status = Estimating | Queued | Starting | Running | Ended | Recovering | Finished
Pending = Estimating | Queued | Ended | Recovering  # without a process, and not finished


def state_name(status: Status) -> str:
    """The name that users see. `Ended` lasts a moment, so users see `recovering`."""
    if isinstance(status, Ended):
        return "recovering"
    return str(status.__struct_config__.tag)
