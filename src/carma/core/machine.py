"""The one door: `step(state, event)` changes the state and returns what the shell must do.

No decisions here: what is decided (a placement, a retry) arrives as an event of its own, so a log replays to the same
state whatever the settings say today. A repeated or late event that changes nothing is ignored.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from carma.core import checkpoint_request as saving
from carma.core.attempt_end import record_end
from carma.core.model import events as e
from carma.core.model.commands import Command, EstimateTask, LaunchAttempt, StopAttempt, WarnAttempt
from carma.core.model.outcome import Outcome, OutOfMemory
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting, effective_ending
from carma.core.model.task import Attempt, Task
from carma.core.model.values import AttemptKey, GpuId, TaskId
from carma.core.recovery import blame
from carma.core.state import SERVER, InvalidEvent, State
from carma.core.telemetry import observation as observe
from carma.core.telemetry import usage
from carma.core.telemetry.measurements import Track
from carma.core.telemetry.pace import regroup


def step(state: State, event: e.AnyEvent) -> list[Command]:
    state.now = max(state.now, event.at)
    match event:
        case e.GpusSampled(samples=samples):
            for sample in samples:
                observe.take(state, sample)
            return []
        case e.MemorySampled(samples=samples):
            for sample in samples:
                observe.take_memory(state, sample)
            return []
        case e.Ticked():
            return []
        case e.TaskSubmitted():
            return _submitted(state, event)
        case e.TaskEstimated():
            return _estimated(state, event)
        case e.TaskPlaced():
            return _placed(state, event)
        case e.AttemptStarted():
            return _started(state, event)
        case e.MemoryObserved():
            return _memory_observed(state, event)
        case e.BookingShrunk():
            return _shrunk(state, event)
        case e.UseNoted():
            return _use_noted(state, event)
        case e.AttemptEnded():
            return _ended(state, event)
        case e.StopRequested():
            return _stop_requested(state, event)
        case e.TaskWarned(task=task_id, signal=signal):
            return _warned(state, task_id, signal)
        case e.PreemptionRequested():
            return saving.requested(state, _task(state, event.task), event)
        case e.PreemptionMissed():
            return saving.missed(state, _task(state, event.task), event)
        case e.GpusFound() | e.GpuDrained() | e.GpuResumed():
            return _gpus_changed(state, event)
        case (
            e.RecoveryPlanned()
            | e.RecoveryDue()
            | e.TaskFinished()
            | e.TaskHeld()
            | e.TaskReleased()
            | e.TaskRetried()
            | e.TaskRestored()
            | e.TaskChanged()
        ):
            return _moved(state, event)
        case _:
            assert_never(event)


def _task(state: State, task_id: TaskId) -> Task:
    task = state.tasks.get(task_id)
    if task is None:
        raise InvalidEvent(f"there is no task {task_id}")
    return task


def _submitted(state: State, event: e.TaskSubmitted) -> list[Command]:
    if event.task in state.tasks:
        raise InvalidEvent(f"task {event.task} was submitted before")
    state.put(
        Task(
            id=event.task,
            owner=event.owner,
            spec=event.spec,
            submitted_at=event.at,
            status=Estimating(event.at, event.held),
        )
    )
    return [EstimateTask(event.task)]


def _estimated(state: State, event: e.TaskEstimated) -> list[Command]:
    task = state.tasks.get(event.task)
    if task is None or not isinstance(task.status, Estimating):
        return []  # cancelled meanwhile
    answer, declared_mib = event.estimate, task.spec.gpu_memory_mib
    if answer is not None and answer.source == "declared" and declared_mib not in (None, answer.upper_mib):
        return [EstimateTask(task.id)]  # the figure was changed after the question was asked
    state.put(
        replace(
            task,
            estimate=event.estimate,
            no_estimate=event.refusals,
            fingerprint=event.fingerprint,
            status=Queued(event.at, task.status.held),
        )
    )
    return []


def _placed(state: State, event: e.TaskPlaced) -> list[Command]:
    task = _task(state, event.key.task)
    if not isinstance(task.status, Queued) or event.key.attempt != task.key.attempt + 1:
        raise InvalidEvent(f"attempt {event.key} cannot be placed: the task is {task.status!r}")
    attempt = Attempt(
        number=event.key.attempt,
        placement=event.placement,
        placed_at=event.at,
        decision=event.why,
        verdicts=event.verdicts,
    )
    state.put(replace(task, attempts=(*task.attempts, attempt), status=Starting(event.at, event.placement)))
    state.tracks[event.key] = track = Track(event.placement.gpus, None)
    track.alone_s = task.estimate.runtime_s if task.estimate is not None else None
    state.last_gpu = event.placement.gpus[-1]
    state.overtaken.pop(task.id, None)
    if event.overtook is not None and event.overtook in state.tasks:
        state.overtaken[event.overtook] = state.overtaken.get(event.overtook, 0) + 1
    _membership_changed(state, event.placement.gpus, event.at)
    return [LaunchAttempt(event.key, task.owner, task.spec, event.placement)]


def _membership_changed(state: State, gpus: tuple[GpuId, ...], at: float) -> None:
    for gpu in gpus:
        state.live_of(gpu).since = at
    regroup(state, gpus, at)


def _current(state: State, key: AttemptKey) -> Task | None:
    """The task, if that attempt is the one under way."""
    task = state.tasks.get(key.task)
    return task if task is not None and state.active.get(key.task) == key else None


def _started(state: State, event: e.AttemptStarted) -> list[Command]:
    task = _current(state, event.key)
    if task is None or not isinstance(task.status, Starting):
        return []
    status = task.status
    attempt = replace(task.attempts[-1], pid=event.pid, started_at=event.at, confinement=event.confinement)
    running = Running(event.at, status.placement, event.pid, status.ending)
    if event.key in state.tracks:
        state.tracks[event.key].begin(event.at)
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt), status=running))
    if status.ending is not None:
        return [StopAttempt(event.key, state.rules.stopping.grace_of(task.spec))]
    return []


def _memory_observed(state: State, event: e.MemoryObserved) -> list[Command]:
    task = _current(state, event.key)
    if task is not None:
        settled = task.attempts[-1].settled
        _go_on(
            state,
            task,
            e.AttemptUse(
                key=event.key,
                peak_mib=event.peak_mib,
                energy_j=event.energy_j,
                activity=event.activity,
                used_s=event.used_s,
                settled=settled,
            ),
        )
    return []


def _shrunk(state: State, event: e.BookingShrunk) -> list[Command]:
    task = _current(state, event.key)
    if task is None or not isinstance(task.status, Running):
        return []  # it ended meanwhile
    booking = task.status.placement.booking
    if event.to_mib >= booking.memory_mib:
        return []
    first_mib = booking.memory_mib if booking.placed_mib is None else booking.placed_mib
    smaller = replace(booking, memory_mib=event.to_mib, placed_mib=first_mib)
    placement = replace(task.status.placement, booking=smaller)
    attempt = replace(task.attempts[-1], placement=placement)
    status = replace(task.status, placement=placement)
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt), status=status))
    return []


def _use_noted(state: State, event: e.UseNoted) -> list[Command]:
    for use in event.attempts:
        task = _current(state, use.key)
        if task is not None:
            _go_on(state, task, use)
    state.idle_w.update(event.idle_w)
    for gpu, watts in event.empty_w.items():
        state.live_of(gpu).empty_w = watts
    usage.noted(state, event.gpus)
    return []


def _go_on(state: State, task: Task, use: e.AttemptUse) -> None:
    """What was seen of an attempt is on record, and what is seen from now on goes on top."""
    attempt = task.attempts[-1]
    attempt = replace(
        attempt,
        observed_mib=attempt.observed_mib if use.peak_mib is None else use.peak_mib,
        energy_j=use.energy_j,
        activity=use.activity,
        used_s=use.used_s,
        alone=use.alone or attempt.alone,
        settled=use.settled,
    )
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt)))
    track = state.tracks.get(use.key)
    if track is not None:
        if use.peak_mib is not None:
            track.peak_mib = max(track.peak_mib or 0, use.peak_mib)
        track.restore(use.energy_j, use.activity, use.used_s, use.alone)


def _ended(state: State, event: e.AttemptEnded) -> list[Command]:
    task = _current(state, event.key)
    if task is None or not isinstance(task.status, Starting | Running):
        return []  # told twice
    attempt = task.attempts[-1]
    outcome = saving.outcome_of(task.status, event)
    peaks = [peak for peak in (attempt.observed_mib, event.peak_mib) if peak is not None]
    attempt = replace(
        attempt,
        ended_at=event.at,
        outcome=outcome,
        observed_mib=max(peaks) if peaks else None,
        energy_j=event.energy_j if event.energy_j is not None else attempt.energy_j,
        activity=event.activity if event.activity is not None else attempt.activity,
        used_s=max(attempt.used_s, event.used_s),
        alone=event.alone or attempt.alone,
    )
    if isinstance(outcome, OutOfMemory) and outcome.where == "gpu":
        attempt = replace(attempt, blame=blame(attempt, outcome, bool(event.over_booking)))
    record_end(state, attempt, event.key, event.at, attempt.blame == "own")
    status = Ended(event.at, outcome, saving.held_after(task.status, outcome))
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt), status=status))
    state.tracks.pop(event.key, None)
    _membership_changed(state, attempt.placement.gpus, event.at)
    return []


def _stop_requested(state: State, event: e.StopRequested) -> list[Command]:
    task = _task(state, event.task)
    match task.status:
        case Starting() | Running():
            ending = effective_ending(task.status.ending, event.ending)
            state.put(replace(task, status=replace(task.status, ending=ending)))
            return [StopAttempt(task.key, event.grace_s, event.signal)]
        case Estimating() | Queued() | Ended() | Recovering():
            _finish(state, task, event.at, event.ending)
            return []
        case Finished():
            return []
        case _:
            assert_never(task.status)


def _warned(state: State, task_id: TaskId, signal: int) -> list[Command]:
    task = _task(state, task_id)
    if not isinstance(task.status, Running):
        return []
    state.put(replace(task, status=replace(task.status, warned=True)))
    return [WarnAttempt(task.key, signal)]


def _finish(state: State, task: Task, at: float, outcome: Outcome) -> None:
    state.put(replace(task, status=Finished(at, outcome)))
    state.overtaken.pop(task.id, None)


Move = (
    e.RecoveryPlanned
    | e.RecoveryDue
    | e.TaskFinished
    | e.TaskHeld
    | e.TaskReleased
    | e.TaskRetried
    | e.TaskRestored
    | e.TaskChanged
)


def _moved(state: State, event: Move) -> list[Command]:
    """From one place of the queue to another."""
    if isinstance(event, e.TaskRestored):
        if event.task.id not in state.tasks:
            state.put(event.task)
        return []
    task = _task(state, event.task)
    match (event, task.status):
        case (e.RecoveryPlanned(plan=plan, until=until), Ended(at=ended_at, held=held)):
            state.put(replace(task, plan=plan, status=Recovering(ended_at, until, held)))
        case (e.RecoveryDue(), Recovering(since=since, held=held)):
            state.put(replace(task, status=Queued(since, held)))
        case (e.TaskFinished(outcome=outcome), Ended(at=ended_at)):
            _finish(state, task, ended_at, outcome)  # the decision may come hours later, at a restart
        case (e.TaskFinished(outcome=outcome), Estimating() | Queued() | Recovering()):
            _finish(state, task, event.at, outcome)
        case (e.TaskHeld(), Queued() | Estimating()):
            state.put(replace(task, status=replace(task.status, held=True)))
        case (e.TaskReleased(), Queued() | Estimating()):
            state.put(replace(task, status=replace(task.status, held=False)))
        case (e.TaskRetried(fresh=fresh), Finished()):
            learnt = None if fresh or task.plan is None else replace(task.plan, first=False)
            state.put(replace(task, plan=learnt, counted_from=task.key.attempt, status=Queued(event.at)))
        case (e.TaskChanged(), _):
            return _changed(state, task, event)
        case _:
            pass  # it arrived after the task had moved on
    return []


def _changed(state: State, task: Task, event: e.TaskChanged) -> list[Command]:
    fields = ("name", "priority", "gpu_memory_mib", "time_limit_s", "comment")
    changes = {field: getattr(event, field) for field in fields if getattr(event, field) is not None}
    if isinstance(task.status, Finished) or not changes:
        return []
    changed = replace(task, spec=replace(task.spec, **changes))
    if event.gpu_memory_mib is None or isinstance(task.status, Starting | Running | Ended):
        state.put(changed)
        return []
    # What the user says now counts, not what recovery or an estimate under way makes of the old figure.
    held = task.status.held
    state.put(replace(changed, plan=None, status=Estimating(event.at, held)))
    return [EstimateTask(task.id)]


def _gpus_changed(state: State, event: e.GpusFound | e.GpuDrained | e.GpuResumed) -> list[Command]:
    match event:
        case e.GpusFound(gpus=gpus):
            state.set_gpus(gpus)
        case e.GpuDrained(gpu=gpu, reason=reason):
            state.drained[SERVER if gpu is None else gpu] = reason
        case e.GpuResumed(gpu=gpu):  # the server's drain and a GPU's own are lifted each by itself
            state.drained.pop(SERVER if gpu is None else gpu, None)
        case _:
            assert_never(event)
    for gpu_id in state.gpus:
        state.touch(gpu_id)
    return []
