"""One sentence of advice for a finished task; empty unless its figures support one.

A pure function over the task's view, so that all clients show the same sentence. A missing figure supports nothing.
"""

from __future__ import annotations

from carma.core.model.units import show_mib, show_pair_mib
from carma.core.telemetry.booking_shrink import with_margin
from carma.wire.api_types import AttemptView, TaskView

MIB_PER_GIB = 1024
SEEN_S = 60.0  # on a GPU: in a shorter run the samples may miss the peak
# Start-ups take up to 55 s (core/telemetry/attribution.py) and keep no GPU busy: here they are a fifth at most.
TYPICAL_S = 300.0
TOO_MUCH = 1.5  # declared / needed: below that, it is a prudent figure
# Share of time with a kernel. A task that waits for the GPU keeps it busy all the time, and one that the GPU waits for
# less than half of it; the rest of the distance is for the error of a share among neighbours.
MOSTLY_WAITED = 0.3
SLOWED = 1.5  # the default of placement.slowdown_cap: sharing is not meant to cost more


def advice(task: TaskView) -> str:
    """Out of memory comes first, then memory that others could have used, then time."""
    if task.state != "finished" or not task.attempts or not task.attempts[-1].gpus:
        return ""
    return _after_oom(task) or _less_memory(task) or _busier_gpu(task.attempts[-1]) or _less_sharing(task.attempts[-1])


def _after_oom(task: TaskView) -> str:
    failed = [attempt for attempt in task.attempts if _own_oom(attempt)]
    if not failed:
        return ""
    times = {1: "once", 2: "twice"}.get(len(failed), f"{len(failed)} times")
    newest = task.attempts[-1]
    if newest is failed[-1] and newest.alone:
        return (
            f"ran out of GPU memory {times}, the last time alone on its GPU: "
            "it needs a smaller batch or model, or a larger GPU"
        )
    declared_mib, needed_mib = task.gpu_memory_mib, _needed_mib(task, failed)
    if declared_mib is None or needed_mib is None or needed_mib <= declared_mib:
        return ""  # without a declared figure the next run books what this one has shown
    declared, enough = show_mib(declared_mib), f"{'' if _succeeded(task) else 'at least '}{_whole_gib(needed_mib)} GiB"
    return f"ran out of GPU memory {times} with {declared} declared: leave --gpu-mem out, or set {enough}"


def _own_oom(attempt: AttemptView) -> bool:
    outcome = attempt.outcome or {}
    is_oom = outcome.get("kind") == "out_of_memory" and outcome.get("where") == "gpu"
    return is_oom and attempt.blame != "neighbour"


def _needed_mib(task: TaskView, failed: list[AttemptView]) -> int | None:
    """Of a task that succeeded its peak, otherwise the most that it held and requested; None if unknown."""
    if _succeeded(task):
        return _peak_mib(task)
    needed = [_held_mib(attempt) + ((attempt.outcome or {}).get("asked_mib") or 0) for attempt in failed]
    return max(needed) or None


def _held_mib(attempt: AttemptView) -> int:
    return max((attempt.outcome or {}).get("peak_mib") or 0, attempt.observed_mib or 0)


def _less_memory(task: TaskView) -> str:
    declared_mib, peak_mib = task.gpu_memory_mib, _peak_mib(task)
    if declared_mib is None or peak_mib is None or task.exclusive or not _succeeded(task):
        return ""
    enough_gib = _whole_gib(peak_mib)
    if not _ran(task.attempts[-1], SEEN_S) or declared_mib < TOO_MUCH * enough_gib * MIB_PER_GIB:
        return ""
    declared, used = show_pair_mib(declared_mib, peak_mib)
    return f"booked {declared}, used {used}: leave --gpu-mem out, or set {enough_gib} GiB"


def _busier_gpu(attempt: AttemptView) -> str:
    seen = attempt.activity
    if seen is None or seen.gr_active is None or not _ran(attempt, TYPICAL_S):
        return ""
    slowdown = 1.0 if attempt.alone else attempt.progress.slowdown
    if slowdown is None or seen.gr_active * slowdown >= MOSTLY_WAITED:
        return ""  # neighbours, and not the program, may have kept it from the GPU
    sm = "" if seen.sm_active is None else f" (SM activity {100 * seen.sm_active:.0f} %)"
    return (
        f"a kernel ran {100 * seen.gr_active:.0f} % of the time{sm}: the GPU waited for the program; "
        "more DataLoader workers or a larger batch may help"
    )


def _less_sharing(attempt: AttemptView) -> str:
    slowdown = attempt.progress.slowdown
    if slowdown is None or attempt.progress.inferred or slowdown < SLOWED or not _ran(attempt, TYPICAL_S):
        return ""
    return f"took {slowdown:.2f} times as long as alone: --exclusive avoids that, and may wait longer for a GPU"


def _succeeded(task: TaskView) -> bool:
    return (task.outcome or {}).get("kind") == "succeeded"


def _peak_mib(task: TaskView) -> int | None:
    """Of all attempts: one that continued from a checkpoint may not have reached the peak."""
    return max((attempt.observed_mib for attempt in task.attempts if attempt.observed_mib), default=None)


def _ran(attempt: AttemptView, least_s: float) -> bool:
    return attempt.used_s is not None and attempt.used_s >= least_s * len(attempt.gpus)


def _whole_gib(mib: int) -> int:
    """With the margin of a booking from an earlier run."""
    return -(-with_margin(mib) // MIB_PER_GIB)
