"""The state machine: `step(state, event)` changes the state and returns commands for the shell.

Nothing is decided here. Decisions (a placement, a retry) come as events, so that a log replays to the same state
whatever the settings are today. A repeated or late event that changes nothing is ignored. `model/transitions.py` lists
the transitions of a task's status.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from carma.core import checkpoint_request as saving
from carma.core import notices, pausing
from carma.core.attempt_end import record_end
from carma.core.model import events as e
from carma.core.model.commands import Command, EstimateTask, LaunchAttempt, StopAttempt, WarnAttempt
from carma.core.model.outcome import Outcome, OutOfMemory
from carma.core.model.status import (
    Ended,
    Estimating,
    Finished,
    Queued,
    Recovering,
    Running,
    Starting,
    effective_ending,
)
from carma.core.model.task import Attempt, Task
from carma.core.model.values import AttemptKey, Booking, TaskId
from carma.core.recovery import blame
from carma.core.state import SERVER, InvalidEvent, State
from carma.core.telemetry import idle, slowed, step_rates, usage
from carma.core.telemetry import observation as observe
from carma.core.telemetry.measurements import Track
from carma.core.telemetry.pace import regroup


def step(state: State, event: e.AnyEvent) -> list[Command]:
    state.now = max(state.now, event.at)
    match event:
        case e.GpusSampled() | e.MemorySampled() | e.StepsCounted() | e.Ticked() | e.UseNoted():
            return _observed(state, event)
        case e.GpusFound() | e.GpuDrained() | e.GpuResumed():
            return _gpus_changed(state, event)
        case e.TaskSubmitted():
            return _submitted(state, event)
        case e.TaskRestored(task=task):
            if task.id not in state.tasks:
                state.put(task)
            return []
        case e.TaskEstimated():
            return _estimated(state, event)
        case e.TaskPlaced() | e.AttemptStarted() | e.MemoryObserved() | e.BookingShrunk() | e.AttemptEnded():
            return _attempt_changed(state, event)
        case e.StopRequested():
            return _stop_requested(state, _task(state, event.task), event)
        case e.TaskWarned():
            return _warned(state, _task(state, event.task), event.signal)
        case e.PreemptionRequested():
            return saving.requested(state, _task(state, event.task), event)
        case e.PreemptionMissed():
            return saving.missed(state, _task(state, event.task), event)
        case e.TaskPaused():
            return pausing.pause(state, _task(state, event.task), event)
        case e.TaskUnpaused():
            return pausing.unpause(state, _task(state, event.task), event)
        case e.NoticeSent(task=task_id, kind=kind, about_at=at):
            state.put(notices.without_notice(_task(state, task_id), kind, at))
            return []
        case e.TaskChanged():
            return _changed(state, _task(state, event.task), event)
        case _:
            return _moved(state, _task(state, event.task), event)


def _observed(state: State, event: e.Transient | e.UseNoted) -> list[Command]:
    match event:
        case e.GpusSampled(samples=samples):
            for sample in samples:
                observe.take(state, sample)
            slowed.observe(state)
        case e.MemorySampled(samples=samples):
            for sample in samples:
                observe.take_memory(state, sample)
        case e.StepsCounted():
            step_rates.take(state, event)
            slowed.observe(state)
        case e.UseNoted():
            return _use_noted(state, event)
        case e.Ticked():
            pass
    return []


AttemptEvent = e.TaskPlaced | e.AttemptStarted | e.MemoryObserved | e.BookingShrunk | e.AttemptEnded


def _attempt_changed(state: State, event: AttemptEvent) -> list[Command]:
    if isinstance(event, e.TaskPlaced):
        return _placed(state, _task(state, event.key.task), event)
    task = _current(state, event.key)
    if task is None:
        return []  # a late or repeated event
    match event:
        case e.AttemptStarted():
            return _started(state, task, event)
        case e.MemoryObserved():
            return _store_use(state, task, event)
        case e.BookingShrunk():
            return _shrunk(state, task, event)
        case e.AttemptEnded():
            return _ended(state, task, event)


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
    if task is None or not task.awaits_estimate:
        return []  # it was cancelled meanwhile
    answer, declared_mib = event.estimate, task.spec.gpu_memory_mib
    if answer is not None and answer.source == "declared" and declared_mib not in (None, answer.upper_mib):
        return [EstimateTask(task.id)]  # the user changed the figure meanwhile
    task = replace(
        task, estimate=answer, no_estimate=event.refusals, fingerprint=event.fingerprint, estimate_pending=False
    )
    match task.status:
        case Estimating(held=held):
            state.put(replace(task, status=Queued(event.at, held)))
        case Starting(placement=placement) | Running(placement=placement):
            state.put(task)
            _estimated_late(state, task, placement.booking)
        case _:
            state.put(task)
    return []


def _estimated_late(state: State, task: Task, booking: Booking) -> None:
    """The task started without an estimate: now it books that, and its demand and run time are known."""
    answer = task.estimate
    if answer is None:
        return
    state.tracks[task.key].alone_s = answer.runtime_s
    if not booking.alone and booking.placed_mib is None:
        memory_mib = min(answer.upper_mib, _left_by_others_mib(state, task))
        _book(state, task, replace(booking, memory_mib=memory_mib, source=answer.source))
    regroup(state, task.attempts[-1].placement.gpus, state.now)


def _left_by_others_mib(state: State, task: Task) -> int:
    """Memory of its GPUs that no other attempt has booked: others may have joined it once it had settled."""
    free: list[int] = []
    for gpu in task.attempts[-1].placement.gpus:
        booked = [one.booking.memory_mib for key, one in state.on_gpu[gpu].items() if key != task.key]
        free.append(state.gpus[gpu].memory_mib - sum(booked) if gpu in state.gpus else 0)
    return max(0, min(free))


def _book(state: State, task: Task, booking: Booking) -> None:
    assert isinstance(task.status, Starting | Running)
    placement = replace(task.status.placement, booking=booking)
    attempt = replace(task.attempts[-1], placement=placement)
    status = replace(task.status, placement=placement)
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt), status=status))


def _placed(state: State, task: Task, event: e.TaskPlaced) -> list[Command]:
    if not isinstance(task.status, Queued | Estimating) or event.key.attempt != task.key.attempt + 1:
        raise InvalidEvent(f"attempt {event.key} cannot be placed: the task is {task.status!r}")
    attempt = Attempt(
        number=event.key.attempt,
        placement=event.placement,
        placed_at=event.at,
        decision=event.why,
        verdicts=event.verdicts,
    )
    pending = task.awaits_estimate
    status = Starting(event.at, event.placement)
    state.put(replace(task, attempts=(*task.attempts, attempt), status=status, estimate_pending=pending))
    state.tracks[event.key] = track = Track(event.placement.gpus, None)
    track.alone_s = task.estimate.runtime_s if task.estimate is not None else None
    state.last_gpu = event.placement.gpus[-1]
    state.overtaken.pop(task.id, None)
    if event.overtook is not None and event.overtook in state.tasks:
        state.overtaken[event.overtook] = state.overtaken.get(event.overtook, 0) + 1
    observe.membership_changed(state, event.placement.gpus, event.at)
    return [LaunchAttempt(event.key, task.owner, task.spec, event.placement)]


def _current(state: State, key: AttemptKey) -> Task | None:
    """The task, if this is its running attempt."""
    task = state.tasks.get(key.task)
    return task if task is not None and state.active.get(key.task) == key else None


def _started(state: State, task: Task, event: e.AttemptStarted) -> list[Command]:
    if not isinstance(task.status, Starting):
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


def _shrunk(state: State, task: Task, event: e.BookingShrunk) -> list[Command]:
    if not isinstance(task.status, Running):
        return []
    booking = task.status.placement.booking
    if event.to_mib >= booking.memory_mib:
        return []
    first_mib = booking.memory_mib if booking.placed_mib is None else booking.placed_mib
    _book(state, task, replace(booking, memory_mib=event.to_mib, placed_mib=first_mib))
    return []


def _use_noted(state: State, event: e.UseNoted) -> list[Command]:
    uses = {use.key: use for use in event.attempts}
    for key in tuple(
        state.active.values()
    ):  # all of them, because a task that is stored moves to the end of the indices
        if key in uses:
            _store_use(state, state.tasks[key.task], uses[key])
        else:
            state.put(state.tasks[key.task])
    state.idle_w.update(event.idle_w)
    for gpu, watts in event.empty_w.items():
        state.live_of(gpu).empty_w = watts
    usage.noted(state, event.gpus)
    step_rates.corrections_noted(state, event.corrections)
    return []


def _store_use(state: State, task: Task, use: e.AttemptUse | e.MemoryObserved) -> list[Command]:
    """Store the observations of an attempt; later observations continue from them."""
    attempt = task.attempts[-1]
    note = use if isinstance(use, e.AttemptUse) else None
    alone, progress = (note.alone, note.progress) if note is not None else (None, None)
    attempt = replace(
        attempt,
        observed_mib=attempt.observed_mib if use.peak_mib is None else use.peak_mib,
        energy_j=use.energy_j,
        activity=use.activity,
        used_s=use.used_s,
        alone=alone or attempt.alone,
        settled=note.settled if note is not None else attempt.settled,
        progress=progress or attempt.progress,
    )
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt)))
    track = state.tracks.get(use.key)
    if track is not None:
        if use.peak_mib is not None:
            track.peak_mib = max(track.peak_mib or 0, use.peak_mib)
        track.restore(use.energy_j, use.activity, use.used_s, alone)
        step_rates.restore(track, progress)
    return []


def _ended(state: State, task: Task, event: e.AttemptEnded) -> list[Command]:
    assert isinstance(task.status, Starting | Running)
    attempt = task.attempts[-1]
    outcome = saving.outcome_of(task.status, event)
    peaks = [peak for peak in (attempt.observed_mib, event.peak_mib) if peak is not None]
    attempt = replace(
        pausing.with_pause(task, event.at),
        ended_at=event.at,
        outcome=outcome,
        observed_mib=max(peaks) if peaks else None,
        energy_j=event.energy_j if event.energy_j is not None else attempt.energy_j,
        activity=event.activity if event.activity is not None else attempt.activity,
        used_s=max(attempt.used_s, event.used_s),
        alone=event.alone or attempt.alone,
        progress=event.progress or attempt.progress,
    )
    if isinstance(outcome, OutOfMemory) and outcome.where == "gpu":
        attempt = replace(attempt, blame=blame(attempt, outcome, bool(event.over_booking)))
    record_end(state, attempt, event.key, event.at, attempt.blame == "own")
    status = Ended(event.at, outcome, saving.held_after(task.status, outcome))
    state.put(replace(task, attempts=(*task.attempts[:-1], attempt), status=status))
    state.tracks.pop(event.key, None)
    observe.membership_changed(state, attempt.placement.gpus, event.at)
    return []


def _stop_requested(state: State, task: Task, event: e.StopRequested) -> list[Command]:
    match task.status:
        case Starting() | Running():
            task, continues = pausing.end_pause(state, task, event.at)
            assert isinstance(task.status, Starting | Running)
            ending = effective_ending(task.status.ending, event.ending)
            state.put(replace(task, status=replace(task.status, ending=ending)))
            return [*continues, StopAttempt(task.key, event.grace_s, event.signal)]
        case Estimating() | Queued() | Ended() | Recovering():
            _finish(state, task, event.at, event.ending)
            return []
        case Finished():
            return []
        case _:
            assert_never(task.status)


def _warned(state: State, task: Task, signal: int) -> list[Command]:
    if not isinstance(task.status, Running):
        return []
    state.put(replace(task, status=replace(task.status, warned=True)))
    return [WarnAttempt(task.key, signal)]


def _finish(state: State, task: Task, at: float, outcome: Outcome) -> None:
    finished = replace(task, status=Finished(at, outcome))
    kinds = notices.kinds_of_end(task, outcome)
    state.put(notices.with_notice(finished, kinds, at, state.rules.notify))
    state.overtaken.pop(task.id, None)


def _moved(state: State, task: Task, event: e.TaskEvent) -> list[Command]:
    """A change of status that depends on the current one."""
    match (event, task.status):
        case (e.RecoveryPlanned(plan=plan, until=until), Ended(at=ended_at, held=held)):
            recovering = replace(task, plan=plan, status=Recovering(ended_at, until, held))
            kinds = notices.kinds_of_retry(task)
            state.put(notices.with_notice(recovering, kinds, event.at, state.rules.notify))
        case (e.RecoveryDue(), Recovering(since=since, held=held)):
            state.put(replace(task, status=Queued(since, held)))
        case (e.TaskFinished(outcome=outcome), Ended(at=ended_at)):
            _finish(state, task, ended_at, outcome)  # not event.at, which can be hours later, after a restart
        case (e.TaskFinished(outcome=outcome), Estimating() | Queued() | Recovering()):
            _finish(state, task, event.at, outcome)
        case (e.NoticeDue(), Queued() as status):
            waiting = replace(task, status=replace(status, wait_noted=True))
            state.put(notices.with_notice(waiting, ("wait",), event.at, state.rules.notify))
        case (e.IdleNoted() | e.IdleOver(), Running()):
            idle.apply(state, task, event)
        case (e.TaskHeld(), Queued() | Estimating()):
            state.put(replace(task, status=replace(task.status, held=True)))
        case (e.TaskReleased(), Queued() | Estimating()):
            state.put(replace(task, status=replace(task.status, held=False)))
        case (e.TaskRetried(fresh=fresh), Finished()):
            learnt = None if fresh or task.plan is None else replace(task.plan, first=False)
            again = replace(task, plan=learnt, counted_from=task.key.attempt, retried_at=event.at)
            state.put(replace(again, status=Queued(event.at)))
        case _:
            pass  # a late event
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
    # The new figure replaces the plan of recovery and the estimate in progress, which used the old one.
    held = task.status.held
    state.put(replace(changed, plan=None, status=Estimating(event.at, held), estimate_pending=False))
    return [EstimateTask(task.id)]


def _gpus_changed(state: State, event: e.GpusFound | e.GpuDrained | e.GpuResumed) -> list[Command]:
    match event:
        case e.GpusFound(gpus=gpus):
            state.set_gpus(gpus)
        case e.GpuDrained(gpu=gpu, reason=reason):
            state.drained[SERVER if gpu is None else gpu] = reason
        case e.GpuResumed(gpu=gpu):  # drains of the server and of a GPU are independent
            state.drained.pop(SERVER if gpu is None else gpu, None)
        case _:
            assert_never(event)
    for gpu_id in state.gpus:
        state.touch(gpu_id)
    return []
