"""How an attempt or a task ended: a tagged union, because recovery depends on the kind."""

from __future__ import annotations

from typing import Literal

from carma.core.model.units import show_mib
from carma.core.model.values import Dependency, Record


class Succeeded(Record, frozen=True, tag="succeeded", tag_field="kind"):
    pass


class Failed(Record, frozen=True, tag="failed", tag_field="kind"):
    """The user's program ended with this code. CARMA never retries it."""

    code: int  # the exit code; 128 + N for a signal
    message: str = ""


class OutOfMemory(Record, frozen=True, tag="out_of_memory", tag_field="kind"):
    """Memory ran out. `asked_mib` is the size of the failed allocation, `peak_mib` the highest use before it."""

    where: Literal["gpu", "host"]
    code: int = 1
    asked_mib: int | None = None
    peak_mib: int | None = None
    message: str = ""  # of the program
    no_retry: str = ""  # why the task is not retried


class Cancelled(Record, frozen=True, tag="cancelled", tag_field="kind"):
    by: str
    reason: str = ""


class TimedOut(Record, frozen=True, tag="timed_out", tag_field="kind"):
    limit_s: float


class LaunchFailed(Record, frozen=True, tag="launch_failed", tag_field="kind"):
    """The command was not started within the start-up timeout, for example because its directory does not answer."""

    reason: str


class Lost(Record, frozen=True, tag="lost", tag_field="kind"):
    """The process is gone and its exit code is unknown (the machine restarted, the runner was killed)."""

    reason: str


class Disrupted(Record, frozen=True, tag="disrupted", tag_field="kind"):
    """A service that the attempt depended on failed (the MPS server ended). The task is retried."""

    reason: str


class Preempted(Record, frozen=True, tag="preempted", tag_field="kind"):
    """The attempt saved a checkpoint and ended on request; the task returns to the queue. Never the end of a task."""

    by: str
    reason: str = ""
    code: int | None = None  # exit code if known; for information only


class NeverFits(Record, frozen=True, tag="never_fits", tag_field="kind"):
    reason: str


Outcome = (
    Succeeded | Failed | OutOfMemory | Cancelled | TimedOut | LaunchFailed | Lost | Disrupted | Preempted | NeverFits
)


def satisfied(dependency: Dependency, outcome: Outcome) -> bool:
    """Whether a dependency on a task is satisfied by how that task ended."""
    return dependency.when == "any" or isinstance(outcome, Succeeded) == (dependency.when == "ok")


def exit_code(outcome: Outcome) -> int:
    """The exit code of `carma wait`."""
    match outcome:
        case Succeeded():
            return 0
        case Failed(code=code) | OutOfMemory(code=code):
            return code or 1
        case Cancelled():
            return 130
        case TimedOut():
            return 124
        case LaunchFailed():
            return 126
        case Lost() | Disrupted() | Preempted() | NeverFits():
            return 1


def describe(outcome: Outcome) -> str:
    """One line for users."""
    match outcome:
        case Succeeded():
            return "succeeded"
        case Failed(code=code, message=message):
            return f"failed with exit code {code}" + (f": {message}" if message else "")
        case OutOfMemory(where=where, asked_mib=asked, peak_mib=peak, no_retry=no_retry):
            parts = ["out of GPU memory" if where == "gpu" else "out of host memory"]
            if asked is not None:
                parts.append(f"requested {show_mib(asked)} {'at once' if peak == 0 else 'more'}")
            if peak:
                parts.append(f"held {show_mib(peak)}")
            return ", ".join(parts) + (f"; {no_retry}" if no_retry else "")
        case Cancelled(by=by, reason=reason):
            return f"cancelled by {by}" + (f": {reason}" if reason else "")
        case TimedOut(limit_s=limit_s):
            return f"reached its time limit of {limit_s:g} s"
        case LaunchFailed(reason=reason):
            return f"could not be started: {reason}"
        case Lost(reason=reason):
            return f"lost: {reason}"
        case Disrupted(reason=reason):
            return f"disrupted: {reason}"
        case Preempted(by=by, reason=reason, code=code):
            ended = f" (exit code {code})" if code else ""
            return f"saved a checkpoint and ended, as requested by {by}" + (f": {reason}" if reason else "") + ended
        case NeverFits(reason=reason):
            return f"can never fit: {reason}"


def describe_to_others(outcome: Outcome) -> str:
    """The kind and the exit code, for owners of dependent tasks.

    Messages are left out, because they may reveal what the task does. The cause of a cancellation is left out, because
    a chain of broken dependencies would repeat every link.
    """
    match outcome:
        case Succeeded() | TimedOut():
            return describe(outcome)
        case Failed(code=code):
            return f"failed with exit code {code}"
        case OutOfMemory(where=where):
            return f"ran out of {'GPU' if where == 'gpu' else 'host'} memory"
        case Cancelled(by=by):
            return f"was cancelled by {by}"
        case LaunchFailed():
            return "could not be started"
        case Lost():
            return "was lost"
        case Disrupted():
            return "was disrupted"
        case Preempted():
            return "was preempted"
        case NeverFits():
            return "can never fit"
