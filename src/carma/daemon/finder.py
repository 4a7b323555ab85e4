"""What the launcher found, as events; what an ended attempt leaves for history. Pure: looks, and changes nothing.

Called at the moment of the commit, on the state as it is then, so a stale answer (the attempt was already seen to end,
the task was placed again) is dropped here and never reaches the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carma.core.events import AttemptEnded, AttemptStarted, Durable, TaskPlaced
from carma.core.model import AttemptKey
from carma.core.observe import ending_facts
from carma.core.outcome import Lost, Outcome, OutOfMemory, Succeeded
from carma.core.ports import Found, PastRun
from carma.core.state import State
from carma.core.status import Running, Starting
from carma.core.task import Attempt


def events_of(state: State, found: Iterable[Found], now: float) -> list[Durable]:
    """AttemptStarted and AttemptEnded for all that the state does not know yet, in the order in which they ended."""
    events: list[Durable] = []
    for entry in sorted(found, key=lambda entry: entry.ended_at or now):
        events.extend(_events_of(state, entry, now))
    return events


def _events_of(state: State, entry: Found, now: float) -> list[Durable]:
    if state.active.get(entry.key.task) != entry.key:
        return []
    status = state.tasks[entry.key.task].status
    events: list[Durable] = []
    started_at = _between(state.now, entry.started_at, now)
    if isinstance(status, Starting) and entry.pid is not None:
        events.append(AttemptStarted(started_at, entry.key, entry.pid))
    if entry.outcome is not None:
        ended_at = max(started_at, _between(state.now, entry.ended_at, now))
        events.append(ended(state, entry.key, entry.outcome, ended_at))
    elif isinstance(status, Running) and entry.pid is None:
        reason = "its record is gone: the attempt's directory was removed while it ran"
        events.append(ended(state, entry.key, Lost(reason), now))
    return events


def ended(state: State, key: AttemptKey, outcome: Outcome, at: float) -> AttemptEnded:
    """The event with what was seen of the attempt."""
    peak_mib, energy_j, over = ending_facts(state, key)
    on_gpu_oom = isinstance(outcome, OutOfMemory) and outcome.where == "gpu"
    if isinstance(outcome, OutOfMemory) and outcome.peak_mib is not None:
        peak_mib = max(peak_mib or 0, outcome.peak_mib)
    return AttemptEnded(at, key, outcome, peak_mib, energy_j, over if on_gpu_oom else ())


def never_launched(state: State, found: Iterable[Found]) -> list[AttemptKey]:
    """Attempts that are placed but of which no process was ever made."""
    return [
        entry.key
        for entry in found
        if entry.pid is None
        and entry.outcome is None
        and state.active.get(entry.key.task) == entry.key
        and isinstance(state.tasks[entry.key.task].status, Starting)
    ]


def called_off(state: State, keys: Sequence[AttemptKey], now: float) -> list[Durable]:
    """The end of those among `keys` that were told to stop before there was anything to stop."""
    events: list[Durable] = []
    for key in keys:
        if state.active.get(key.task) != key:
            continue
        status = state.tasks[key.task].status
        if isinstance(status, Starting) and status.ending is not None:
            events.append(ended(state, key, status.ending, max(now, state.now)))
    return events


def past_run(state: State, key: AttemptKey, collocated: bool) -> PastRun | None:
    """An ended attempt as history remembers it; None for one that never ran."""
    task = state.tasks.get(key.task)
    attempt = _attempt(task.attempts, key.attempt) if task is not None else None
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
        runtime_s=max(0.0, attempt.ended_at - attempt.started_at),
        succeeded=isinstance(attempt.outcome, Succeeded),
        collocated=collocated,
        ended_at=attempt.ended_at,
    )


def neighbours(state: State, placed: TaskPlaced) -> set[AttemptKey]:
    """The attempts that share a GPU since this placement, itself included; empty when it has its GPUs alone."""
    shared: set[AttemptKey] = set()
    for gpu in placed.placement.gpus:
        holders = state.on_gpu.get(gpu, {})
        if len(holders) > 1:
            shared.update(holders)
    return shared


def _attempt(attempts: Sequence[Attempt], number: int) -> Attempt | None:
    return next((attempt for attempt in attempts if attempt.number == number), None)


def _between(earliest: float, at: float | None, latest: float) -> float:
    """A time that a runner wrote, on the daemon's own clock: never before the last event, never in the future."""
    return latest if at is None else max(min(at, latest), min(earliest, latest))
