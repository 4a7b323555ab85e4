"""Words and exit codes for what the daemon answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from carma.core.model import outcome as outcomes
from carma.core.model.units import show_mib, show_s
from carma.wire.api_types import Outcome, TaskView

BUSY = {
    "sm_active": "SM activity",
    "sm_occupancy": "SM occupancy",
    "dram_active": "DRAM",
    "gr_active": "any kernel",
    "tensor_active": "tensor cores",
}
WAITING = ("estimating", "queued", "recovering")


def many(count: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def spans(ids: Iterable[int]) -> str:
    """`9-18 21`: as the verbs that take ids read them."""
    found: list[list[int]] = []
    for task in sorted(set(ids)):
        if found and found[-1][-1] == task - 1:
            found[-1][1:] = [task]
        else:
            found.append([task])
    return " ".join("-".join(str(end) for end in span) for span in found)


def gpu_hours(gpu_s: float) -> str:
    """`3.1 GPU-hours`, `12.0 GPU-minutes` below one, `9.5 GPU-seconds` below one of these."""
    if gpu_s >= 3600 or not gpu_s:
        return f"{gpu_s / 3600:,.1f} GPU-hours"
    return f"{gpu_s / 60:.1f} GPU-minutes" if round(gpu_s, 1) >= 60 else f"{gpu_s:.1f} GPU-seconds"


def ran_s(task: TaskView, now: float) -> float | None:
    """Of its newest attempt, so that waiting after it is not counted; an older daemon tells only start and end."""
    if task.ran_s is not None:
        return max(0.0, task.ran_s)
    return None if task.started_at is None else max(0.0, (task.ended_at or now) - task.started_at)


def percent(share: float | None) -> str:
    """`45`, `-` for an absent figure."""
    return "-" if share is None else f"{100 * share:.0f}"


def which_tasks(ids: Sequence[int]) -> str:
    """`task 9`, `tasks 9-18 (10)`."""
    return f"task {ids[0]}" if len(ids) == 1 else f"tasks {spans(ids)} ({len(ids):,})"


def by(source: str) -> str:
    """Who gave a memory figure."""
    return "its size is not known" if source == "unknown" else source


def level_text(level: float | None) -> str:
    """` at 99 %`: how sure a bound is said to be; nothing where nobody says."""
    return "" if level is None else f" at {100 * level:g} %"


def parts_text(parts_mib: Mapping[str, int]) -> str:
    """`activations 3.1 GiB, weights 98 MiB`: what a footprint is made of, the largest first."""
    found = sorted(parts_mib.items(), key=lambda part: -part[1])
    return ", ".join(f"{name.replace('_', ' ')} {show_mib(mib)}" for name, mib in found if mib)


def outcome_text(value: Outcome) -> str:
    """The core's sentence; an outcome of a newer daemon is named by its kind."""
    try:
        return outcomes.describe(msgspec.convert(value, outcomes.Outcome))
    except msgspec.ValidationError:
        return str(value.get("kind", "ended"))


def short_ending(task: TaskView) -> str:
    """How it ended beyond what a state and an exit code say: its last words, who cancelled it, the memory it held."""
    if task.outcome is None:
        return ""
    try:
        outcome = msgspec.convert(task.outcome, outcomes.Outcome)
    except msgspec.ValidationError:
        return task.reason
    match outcome:
        case outcomes.Succeeded():
            return ""
        case outcomes.Failed(message=message):
            return message
        case outcomes.OutOfMemory(asked_mib=asked, peak_mib=peak, message=message):
            known = (("held", peak), ("asked for", asked))
            told = ", ".join(f"{what} {show_mib(mib)}" for what, mib in known if mib is not None)
            return told + (" more" if asked is not None else "") or message
        case outcomes.Cancelled(by=by, reason=reason):
            return f"by {by}" + (f": {reason}" if reason else "")
        case outcomes.TimedOut(limit_s=limit_s):
            return f"limit {show_s(limit_s)}"
        case outcomes.Preempted(by=by, reason=reason):
            return f"by {by}" + (f": {reason}" if reason else "")
        case (
            outcomes.LaunchFailed(reason=reason)
            | outcomes.Lost(reason=reason)
            | outcomes.Disrupted(reason=reason)
            | outcomes.NeverFits(reason=reason)
        ):
            return reason
    assert_never(outcome)


def figure(name: str, value: float) -> str:
    """A part of a score: `room 40.0 GiB`, `sm_free 0.93`."""
    if name.endswith("_mib"):
        return f"{name.removesuffix('_mib')} {show_mib(value)}"
    if value == int(value):
        return f"{name} {value:.0f}"
    return f"{name} {value:.2f}" if 0.01 <= abs(value) < 1e6 else f"{name} {value:.3g}"


def exit_code_of(task: TaskView) -> int:
    """What `wait` and `run` return for a finished task."""
    if task.exit_code is not None:
        return task.exit_code
    if task.outcome is None:
        return 0
    try:
        return outcomes.exit_code(msgspec.convert(task.outcome, outcomes.Outcome))
    except msgspec.ValidationError:
        return 1


def ending(task: TaskView) -> str:
    """`task 12 succeeded`, for the line after following it."""
    return f"task {task.id} " + (outcome_text(task.outcome) if task.outcome else task.state)
