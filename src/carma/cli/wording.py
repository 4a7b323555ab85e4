"""Words, figures and exit codes for the daemon's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from carma.core.model import outcome as outcomes
from carma.core.model.units import show_count, show_mib, show_s
from carma.wire.api_types import Outcome, ProgressView, TaskView

ACTIVITY_NAMES = {
    "sm_active": "SM activity",
    "sm_occupancy": "SM occupancy",
    "dram_active": "DRAM",
    "gr_active": "any kernel",
    "tensor_active": "tensor cores",
}
WAITING = ("estimating", "queued", "recovering")


def id_ranges(ids: Iterable[int]) -> str:
    """`9-18 21`, as the verbs that take IDs read it."""
    found: list[list[int]] = []
    for task in sorted(set(ids)):
        if found and found[-1][-1] == task - 1:
            found[-1][1:] = [task]
        else:
            found.append([task])
    return " ".join("-".join(str(end) for end in span) for span in found)


def tasks_text(ids: Sequence[int]) -> str:
    """`task 9`, `tasks 9-18 (10)`."""
    return f"task {ids[0]}" if len(ids) == 1 else f"tasks {id_ranges(ids)} ({len(ids):,})"


def gpu_hours(gpu_s: float) -> str:
    """`3.1 GPU-hours`; `12.0 GPU-minutes` below an hour; `9.5 GPU-seconds` below a minute."""
    if gpu_s >= 3600 or not gpu_s:
        return f"{gpu_s / 3600:,.1f} GPU-hours"
    return f"{gpu_s / 60:.1f} GPU-minutes" if round(gpu_s, 1) >= 60 else f"{gpu_s:.1f} GPU-seconds"


def ran_s(task: TaskView, now: float) -> float | None:
    """Run time of the newest attempt. An older daemon reports only the start and the end of the task."""
    if task.ran_s is not None:
        return max(0.0, task.ran_s)
    return None if task.started_at is None else max(0.0, (task.ended_at or now) - task.started_at)


def percent(share: float | None) -> str:
    """`45`; `-` for a missing figure."""
    return "-" if share is None else f"{100 * share:.0f}"


def activity_text(share_of: Callable[[str], float | None]) -> str:
    """`SM activity 45 %, DRAM 10 %`, without the missing metrics."""
    known = [(what, share_of(name)) for name, what in ACTIVITY_NAMES.items()]
    return ", ".join(f"{what} {100 * share:.0f} %" for what, share in known if share is not None)


def rate_text(per_s: float | None) -> str:
    """`12.3`; `0.083` for slow steps; `-` for a missing figure."""
    if per_s is None:
        return "-"
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"


def slowdown_text(progress: ProgressView) -> str:
    """`1.24`; `~1.2` if it is inferred from activity; `-` if it is unknown."""
    if progress.slowdown is None:
        return "-"
    return f"~{progress.slowdown:.1f}" if progress.inferred else f"{progress.slowdown:.2f}"


def progress_text(progress: ProgressView, now: float) -> str:
    """`1,200 steps, 12.3 steps/s, slowdown 1.24 (15.2 steps/s alone)`."""
    parts = [] if progress.steps is None else [show_count(progress.steps, "optimizer step")]
    if progress.steps_per_s is not None:
        parts.append(f"{rate_text(progress.steps_per_s)} steps/s")
    elif progress.last_step_at is not None:
        parts.append(f"the last one {show_s(max(0.0, now - progress.last_step_at))} ago")
    return ", ".join([*parts, *filter(None, [slowdown_phrase(progress)])])


def slowdown_phrase(progress: ProgressView) -> str:
    """`slowdown 1.24 (15.2 steps/s alone)`; empty if it is unknown."""
    if progress.slowdown is None:
        return ""
    if progress.inferred:
        return f"slowdown about {progress.slowdown:.1f} (inferred from activity)"
    return f"slowdown {progress.slowdown:.2f} ({rate_text(progress.alone_steps_per_s)} steps/s alone)"


def source_text(source: str) -> str:
    """The source of a memory figure."""
    return "size unknown" if source == "unknown" else source


def level_text(level: float | None) -> str:
    """` at 99 %`: the level of a bound; empty for a bound without a level."""
    return "" if level is None else f" at {100 * level:g} %"


def parts_text(parts_mib: Mapping[str, int]) -> str:
    """`activations 3.1 GiB, weights 98 MiB`: the parts of a footprint, the largest first."""
    found = sorted(parts_mib.items(), key=lambda part: -part[1])
    return ", ".join(f"{name.replace('_', ' ')} {show_mib(mib)}" for name, mib in found if mib)


def score_text(name: str, value: float) -> str:
    """A part of a score: `room 40.0 GiB`, `sm free 0.93`."""
    if name.endswith("_mib"):
        return f"{name.removesuffix('_mib')} {show_mib(value)}"
    name = name.replace("_", " ")
    if value == int(value):
        return f"{name} {value:.0f}"
    return f"{name} {value:.2f}" if 0.01 <= abs(value) < 1e6 else f"{name} {value:.3g}"


def _known(value: Outcome | None) -> outcomes.Outcome | None:
    """None for no outcome, and for an outcome of a newer daemon."""
    try:
        return None if value is None else msgspec.convert(value, outcomes.Outcome)
    except msgspec.ValidationError:
        return None


def outcome_text(value: Outcome) -> str:
    """The core's sentence; for an outcome of a newer daemon its kind."""
    outcome = _known(value)
    return str(value.get("kind", "ended")) if outcome is None else outcomes.describe(outcome)


def short_ending(task: TaskView) -> str:
    """What state and exit code do not show: the last words of the task, who cancelled it, its memory."""
    outcome = _known(task.outcome)
    match outcome:
        case None:
            return task.reason if task.outcome is not None else ""
        case outcomes.Succeeded():
            return ""
        case outcomes.Failed(message=message):
            return message
        case outcomes.OutOfMemory(asked_mib=asked, peak_mib=peak, message=message):
            figures = (("held", peak), ("requested", asked))
            text = ", ".join(f"{what} {show_mib(mib)}" for what, mib in figures if mib is not None)
            return text + (" more" if asked is not None else "") or message
        case outcomes.Cancelled(by=by, reason=reason) | outcomes.Preempted(by=by, reason=reason):
            return f"by {by}" + (f": {reason}" if reason else "")
        case outcomes.TimedOut(limit_s=limit_s):
            return f"limit {show_s(limit_s)}"
        case outcomes.LaunchFailed() | outcomes.Lost() | outcomes.Disrupted() | outcomes.NeverFits():
            return outcome.reason
    assert_never(outcome)


def exit_code_of(task: TaskView) -> int:
    """The exit code that `wait` and `run` return for a finished task."""
    if task.exit_code is not None:
        return task.exit_code
    if task.outcome is None:
        return 0
    outcome = _known(task.outcome)
    return 1 if outcome is None else outcomes.exit_code(outcome)


def ending(task: TaskView) -> str:
    """`task 12 succeeded`."""
    return f"task {task.id} " + (outcome_text(task.outcome) if task.outcome else task.state)
