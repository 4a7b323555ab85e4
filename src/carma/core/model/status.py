"""Where a task stands. Each status carries its own data; there is no field that is "set only when running"."""

from __future__ import annotations

from carma.core.model.outcome import Cancelled, Disrupted, Outcome, OutOfMemory, TimedOut
from carma.core.model.values import Placement, Record, TaskId

# Why a running attempt was told to stop. OutOfMemory: the watchdog, before it took what others have booked.
Ending = Cancelled | TimedOut | OutOfMemory | Disrupted


def that_counts(before: Ending | None, asked: Ending) -> Ending:
    """Of two words to stop, usually the first. But what CARMA stops by itself it would bring back: a user's word
    counts more."""
    by_user = isinstance(asked, Cancelled) and isinstance(before, OutOfMemory | Disrupted)
    return asked if before is None or by_user else before


class Preempting(Record, frozen=True, kw_only=True):
    """A running attempt was asked to save and leave. Nothing follows if it does not."""

    at: float
    until: float  # so long it has
    signal: int
    by: str
    reason: str = ""
    hold: bool = False  # whether the task is held when it is back in the line
    room_for: TaskId | None = None  # the waiting task that is to start in its place


class Estimating(Record, frozen=True, tag="estimating", tag_field="state"):
    since: float
    held: bool = False


class Queued(Record, frozen=True, tag="queued", tag_field="state"):
    since: float
    held: bool = False


class Starting(Record, frozen=True, tag="starting", tag_field="state"):
    """Placed and booked; the launcher has been told, the process has not been seen yet."""

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
    stayed_at: float | None = None  # when the time was over that it had to leave, the last time it was asked


class Ended(Record, frozen=True, tag="ended", tag_field="state"):
    """The newest attempt has ended; recovery has not decided yet between a retry and the end of the task."""

    at: float
    outcome: Outcome
    held: bool = False  # whether the task is held if it goes back to the queue


class Recovering(Record, frozen=True, tag="recovering", tag_field="state"):
    """Waits for a retry: goes back to the queue at `until` with the task's plan."""

    since: float  # the end of the attempt
    until: float
    held: bool = False


class Finished(Record, frozen=True, tag="finished", tag_field="state"):
    at: float
    outcome: Outcome


Status = Estimating | Queued | Starting | Running | Ended | Recovering | Finished
Active = Starting | Running
Pending = Estimating | Queued | Ended | Recovering  # without a process, and not finished


def state_name(status: Status) -> str:
    """The name that users see. An attempt's end lasts a moment; to users the task recovers already."""
    if isinstance(status, Ended):
        return "recovering"
    return str(status.__struct_config__.tag)
