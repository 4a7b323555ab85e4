"""What the launcher found, as events; an ended attempt as a past run. Pure functions.

They are called at the moment of the commit. A stale answer of the launcher (the attempt's end is already recorded, the
task was placed again) is dropped here and never reaches the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from carma.core.attempt_end import ended
from carma.core.model.events import AttemptStarted, Durable, StopRequested, TaskPlaced
from carma.core.model.outcome import Disrupted, Failed, Lost, OutOfMemory, Preempted, Succeeded
from carma.core.model.status import Running, Starting
from carma.core.model.task import Attempt
from carma.core.model.values import AttemptKey
from carma.core.ports import AttemptReport, PastRun
from carma.core.recovery import not_enough_mib
from carma.core.state import State

DISRUPTED_GRACE_S = 2.0  # without its MPS server an attempt can close its files, but not save what is on the GPU


def events_of(state: State, found: Iterable[AttemptReport], now: float) -> list[Durable]:
    """AttemptStarted and AttemptEnded for what the state does not know yet, in the order of the ends; StopRequested for
    attempts whose MPS server has ended."""
    found = sorted(found, key=lambda entry: entry.ended_at or now)
    guilty = [entry.key for entry in found if _above_booking(state, entry)]
    return [event for entry in found for event in _events_of(state, entry, now, guilty)]


def _events_of(state: State, entry: AttemptReport, now: float, guilty: Sequence[AttemptKey]) -> list[Durable]:
    if state.active.get(entry.key.task) != entry.key:
        return []
    status = state.tasks[entry.key.task].status
    assert isinstance(status, Starting | Running)
    events: list[Durable] = []
    started_at = _between(state.now, entry.started_at, now)
    if isinstance(status, Starting) and entry.pid is not None:
        events.append(AttemptStarted(started_at, entry.key, entry.pid, entry.confinement))
    if entry.outcome is not None:
        ended_at = max(started_at, _between(state.now, entry.ended_at, now))
        outcome = entry.outcome
        if entry.trouble is not None and isinstance(outcome, Failed):
            outcome = Disrupted(entry.trouble)  # it failed before it could be stopped
        event = ended(state, entry.key, outcome, ended_at, guilty)
        events.append(replace(event, untold=True) if _untold(status, entry) else event)
    elif isinstance(status, Running) and entry.pid is None and not entry.claimed:
        reason = "its record is gone: the attempt's directory was removed while it ran"
        events.append(ended(state, entry.key, Lost(reason), now))
    elif entry.trouble is not None and status.ending is None:
        events.append(StopRequested(now, entry.key.task, Disrupted(entry.trouble), DISRUPTED_GRACE_S))
    return events


def _untold(status: Starting | Running, entry: AttemptReport) -> bool:
    """Whether the attempt was to be asked to save, and ended before that."""
    asked = status.preempting if isinstance(status, Running) else None
    return asked is not None and entry.checkpoint_asked_at != asked.at


def _above_booking(state: State, entry: AttemptReport) -> bool:
    """Whether the attempt ran out of GPU memory with more than its booking, by its own error message."""
    outcome, task = entry.outcome, state.tasks.get(entry.key.task)
    if task is None or state.active.get(task.id) != entry.key or not isinstance(outcome, OutOfMemory):
        return False
    wanted_mib = (outcome.peak_mib or 0) + (outcome.asked_mib or 0)
    return outcome.where == "gpu" and wanted_mib > task.attempts[-1].placement.booking.memory_mib


def never_launched(state: State, found: Iterable[AttemptReport]) -> list[AttemptKey]:
    """Attempts that are placed and never had a process."""
    return [
        entry.key
        for entry in found
        if entry.pid is None
        and entry.outcome is None
        and not entry.claimed
        and state.active.get(entry.key.task) == entry.key
        and isinstance(state.tasks[entry.key.task].status, Starting)
    ]


def called_off(state: State, keys: Sequence[AttemptKey], now: float) -> list[Durable]:
    """The end of those attempts among `keys` that were told to stop before they had a process."""
    events: list[Durable] = []
    for key in keys:
        if state.active.get(key.task) != key:
            continue
        status = state.tasks[key.task].status
        if isinstance(status, Starting) and status.ending is not None:
            events.append(ended(state, key, status.ending, max(now, state.now)))
    return events


def past_run(state: State, key: AttemptKey, collocated: bool, fingerprint: str = "") -> PastRun | None:
    """An ended attempt as a past run; None if it never ran. `fingerprint`: of a task that ended before its estimate."""
    task = state.tasks.get(key.task)
    attempts = task.attempts if task is not None else ()
    attempt = next((one for one in attempts if one.number == key.attempt), None)
    if task is None or attempt is None or attempt.started_at is None or attempt.ended_at is None:
        return None
    gpu = state.gpus.get(attempt.placement.gpus[0]) if attempt.placement.gpus else None
    return PastRun(
        key=key,
        uid=task.owner.uid,
        command=task.spec.command,
        directory=task.spec.directory,
        gpus=task.spec.gpus,
        gpu_model=gpu.name if gpu is not None else "",
        peak_mib=attempt.observed_mib,
        runtime_s=_run_s(attempt) + sum(_run_s(one) for one in task.attempts if _went_on(one, attempt)),
        succeeded=isinstance(attempt.outcome, Succeeded),
        collocated=collocated,
        ended_at=attempt.ended_at,
        energy_j=attempt.own_energy_j,
        activity=attempt.activity,
        alone=attempt.alone,
        fingerprint=task.fingerprint or fingerprint,
        more_than_mib=not_enough_mib(attempt),
        progress=attempt.progress,
    )


def _run_s(attempt: Attempt) -> float:
    if attempt.started_at is None or attempt.ended_at is None:
        return 0.0
    return max(0.0, attempt.ended_at - attempt.started_at - attempt.paused_s)


def _went_on(before: Attempt, attempt: Attempt) -> bool:
    """Whether the later attempt continued from what the earlier one had saved: both are parts of one run."""
    return before.number < attempt.number and isinstance(before.outcome, Preempted)


def neighbours(state: State, placed: TaskPlaced) -> set[AttemptKey]:
    """The attempts that share a GPU since this placement, itself included; empty if it has its GPUs alone."""
    held = (state.on_gpu.get(gpu, {}) for gpu in placed.placement.gpus)
    return {key for keys in held if len(keys) > 1 for key in keys}


def _between(earliest: float, at: float | None, latest: float) -> float:
    """A time that a runner wrote, on the daemon's clock: never before the last event, never in the future."""
    return latest if at is None else max(min(at, latest), min(earliest, latest))
