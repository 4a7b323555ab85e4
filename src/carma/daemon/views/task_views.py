"""The state as the API shows it. Reads only; what somebody else's task runs, and where, is left out here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, assert_never

import msgspec

from carma.core.model.outcome import (
    Cancelled,
    Disrupted,
    Failed,
    LaunchFailed,
    Lost,
    NeverFits,
    Outcome,
    OutOfMemory,
    Preempted,
    Succeeded,
    TimedOut,
    describe,
    exit_code,
)
from carma.core.model.status import (
    Ended,
    Estimating,
    Finished,
    Pending,
    Queued,
    Recovering,
    Running,
    Starting,
    Status,
    state_name,
)
from carma.core.model.task import Attempt, Task
from carma.core.model.units import show_s
from carma.core.model.values import ACTIVITY_METRICS, Activity, AttemptKey, Confinement, Estimate, Gpu, GpuId, TaskId
from carma.core.scheduling.decision import Ask, Refusal
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import refuse
from carma.core.scheduling.queue_order import Waiting, ask_of, waiting
from carma.core.scheduling.snapshot import views
from carma.core.state import SERVER, State
from carma.core.telemetry.window import METRICS
from carma.daemon.auth import Identity
from carma.daemon.views.task_story import without_words
from carma.launch.attempt_files import AttemptFiles
from carma.launch.output_paths import named_outputs, program_name
from carma.wire import api_types as t

HIDDEN = "-"


class Lens(NamedTuple):
    """What every view depends on: the state, the time, the viewer, and where CARMA's own logs are."""

    state: State
    now: float
    who: Identity
    log_dir: Path
    sizes: tuple[Gpu, ...] | None = None  # `by_size(state)`, for those who look at many tasks
    stage: Callable[[TaskId], str] = lambda _task: ""  # how far the estimate of a task is


def code_of(status: Status) -> str:
    """The short code that users of other queues know."""
    match status:
        case Estimating(held=True) | Queued(held=True):
            return "H"
        case Estimating() | Queued() | Ended() | Recovering():
            return "PD"
        case Starting(ending=ending) | Running(ending=ending):
            return "R" if ending is None else "CG"
        case Finished(outcome=outcome):
            return outcome_code(outcome)
        case _:
            assert_never(status)


def outcome_code(outcome: Outcome) -> str:
    match outcome:
        case Succeeded():
            return "CD"
        case Failed():
            return "F"
        case OutOfMemory():
            return "OOM"
        case Cancelled():
            return "CA"
        case TimedOut():
            return "TO"
        case LaunchFailed():
            return "LF"
        case Lost():
            return "LO"
        case Disrupted():
            return "DI"
        case Preempted():
            return "PR"
        case NeverFits():
            return "NF"
        case _:
            assert_never(outcome)


def task_views(tasks: Iterable[Task], lens: Lens) -> list[t.TaskView]:
    listed = list(tasks)
    reasons = reasons_of(listed, lens)
    return [task_view(task, lens, reasons.get(task.id)) for task in listed]


def reasons_of(tasks: Iterable[Task], lens: Lens) -> dict[TaskId, Waiting]:
    """Why those of them wait that do; all in one walk along the queue, which costs hardly more than one of them."""
    waits = (task for task in tasks if isinstance(task.status, Pending))
    ids = [task.id for task in waits if task.id in lens.state.tasks]
    found = waiting(lens.state, lens.now, ids) if ids else {}
    for task_id, why in found.items():
        stage = lens.stage(task_id) if isinstance(lens.state.tasks[task_id].status, Estimating) else ""
        if stage:
            found[task_id] = msgspec.structs.replace(why, sentence=f"{why.sentence}: {stage}")
    return found


def task_view(task: Task, lens: Lens, why: Waiting | None) -> t.TaskView:
    open_to_viewer = lens.who.may_see(task)
    spec, status = task.spec, task.status
    attempts = tuple(_attempt_view(task, attempt, lens) for attempt in task.attempts)
    newest = attempts[-1] if attempts else None
    outcome = status.outcome if isinstance(status, Finished) else None
    asked = status.preempting if isinstance(status, Running) else None
    reason_code, reason = _reason(task, why, open_to_viewer, lens.now)
    return t.TaskView(
        id=task.id,
        name=spec.name or (program_name(spec.command) if open_to_viewer else HIDDEN),
        user=task.owner.name,
        uid=task.owner.uid,
        state=state_name(status),
        code=code_of(status),
        outcome=_outcome(outcome, open_to_viewer),
        reason=reason,
        reason_code=reason_code,
        command=spec.command if open_to_viewer else (HIDDEN,),
        directory=spec.directory if open_to_viewer else HIDDEN,
        gpus=newest.gpus if newest is not None else (),
        gpu_indices=_indices(newest.gpus, lens.state) if newest is not None else (),
        gpus_wanted=spec.gpus,
        gpu_memory_mib=spec.gpu_memory_mib,
        exclusive=spec.exclusive,
        priority=spec.priority,
        held=isinstance(status, Estimating | Queued) and status.held,
        estimate=_estimate_view(task.estimate, open_to_viewer),
        booking_mib=newest.booking_mib if newest is not None else None,
        needs_mib=ask_of(task, lens.state, lens.sizes).memory_mib
        if isinstance(status, Pending) and not isinstance(status, Estimating)
        else None,
        observed_mib=newest.observed_mib if newest is not None else None,
        attempts=attempts,
        submitted_at=task.submitted_at,
        started_at=newest.started_at if newest is not None else None,
        ended_at=status.at if isinstance(status, Finished) else None,
        begin_at=spec.begin_at,
        reserved_start_at=why.reserved_start_at if why is not None else None,
        time_limit_s=spec.time_limit_s,
        after=tuple(f"{dependency.when}:{dependency.task}" for dependency in spec.after),
        array=f"{spec.array.array}[{spec.array.index}]" if spec.array is not None else None,
        comment=spec.comment if open_to_viewer else "",
        exit_code=exit_code(outcome) if outcome is not None else None,
        mechanism=newest.mechanism if newest is not None else None,
        mechanism_asked=spec.mechanism,
        threads_percent=spec.threads_percent,
        checkpoint_signal=spec.checkpoint.signal if spec.checkpoint is not None else None,
        checkpoint_grace_s=spec.checkpoint.grace_s if spec.checkpoint is not None else None,
        asked_to_save_at=asked.at if asked is not None else None,
        energy_j=_sum(attempt.energy_j for attempt in attempts),
        sm_active=newest.activity.sm_active if newest is not None and newest.activity is not None else None,
        ran_s=_ran_s(newest, lens.now) if newest is not None else None,
    )


def _ran_s(attempt: t.AttemptView, now: float) -> float | None:
    if attempt.started_at is None:
        return None
    return max(0.0, (now if attempt.ended_at is None else attempt.ended_at) - attempt.started_at)


def _reason(task: Task, why: Waiting | None, open_to_viewer: bool, now: float) -> tuple[str, str]:
    """(code, sentence): why it waits, how it ended, what it was asked to do; or nothing while it just runs."""
    match task.status:
        case Finished(outcome=outcome):
            return outcome_code(outcome), describe(outcome if open_to_viewer else without_words(outcome))
        case Starting(ending=ending) | Running(ending=ending):
            if ending is None:
                return _saving(task.status, open_to_viewer, now)
            return "Stopping", f"is being stopped: {describe(ending if open_to_viewer else without_words(ending))}"
        case Estimating() | Queued() | Ended() | Recovering():
            return (why.code, why.sentence) if why is not None else ("", "")
        case _:
            assert_never(task.status)


def _saving(status: Starting | Running, open_to_viewer: bool, now: float) -> tuple[str, str]:
    """Of one that was asked to save and leave, or was and did not."""
    if not isinstance(status, Running):
        return "", ""
    asked = status.preempting
    if asked is not None:
        told = open_to_viewer or asked.room_for is not None  # what a user wrote is for the owner
        why = f": {asked.reason}" if asked.reason and told else ""
        return "Saving", f"asked to save {show_s(max(0.0, now - asked.at))} ago by {asked.by}{why}"
    if status.stayed_at is not None:
        return "Stayed", f"was asked to save and did not leave in time, {show_s(max(0.0, now - status.stayed_at))} ago"
    return "", ""


def _outcome(outcome: Outcome | None, open_to_viewer: bool) -> t.Outcome | None:
    if outcome is None:
        return None
    made: t.Outcome = msgspec.to_builtins(outcome if open_to_viewer else without_words(outcome))
    return made


def _estimate_view(estimate: Estimate | None, open_to_viewer: bool) -> t.EstimateView | None:
    if estimate is None:
        return None
    return t.EstimateView(
        footprint_mib=estimate.footprint_mib,
        upper_mib=estimate.upper_mib,
        source=estimate.source,
        seconds=estimate.seconds,
        level=estimate.level,
        allocated_mib=estimate.allocated_mib,
        reserved_mib=estimate.reserved_mib,
        steps_seen=estimate.steps_seen,
        rests_on=estimate.rests_on if open_to_viewer else "",
        gpu_model=estimate.gpu_model,
        parts_mib=estimate.parts_mib,
        runtime_s=estimate.runtime_s,
        demand=msgspec.to_builtins(estimate.demand) if estimate.demand is not None else {},
        demand_predicted=estimate.demand_predicted,
        warnings=estimate.warnings if open_to_viewer else (),
    )


def _output_paths(task: Task, key: AttemptKey, log_dir: Path) -> tuple[str, str]:
    stdout, stderr = named_outputs(key, task.owner, task.spec)
    own = AttemptFiles(log_dir)
    return stdout or own.log_path(key, "stdout"), stderr or own.log_path(key, "stderr")


def _attempt_view(task: Task, attempt: Attempt, lens: Lens) -> t.AttemptView:
    key = AttemptKey(task.id, attempt.number)
    open_to_viewer = lens.who.may_see(task)
    stdout, stderr = _output_paths(task, key, lens.log_dir) if open_to_viewer else ("", "")
    track = lens.state.tracks.get(key)
    seen = [mib for mib in (attempt.observed_mib, track.peak_mib if track is not None else None) if mib is not None]
    return t.AttemptView(
        number=attempt.number,
        gpus=attempt.placement.gpus,
        booking_mib=attempt.placement.booking.memory_mib,
        booking_source=attempt.placement.booking.source,
        alone=attempt.placement.booking.alone,
        decision=attempt.decision,
        placed_at=attempt.placed_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        pid=attempt.pid,
        observed_mib=max(seen) if seen else None,
        energy_j=attempt.own_energy_j if track is None or track.energy_j is None else track.energy_j,
        outcome=_outcome(attempt.outcome, open_to_viewer),
        blame=attempt.blame,
        stdout=stdout,
        stderr=stderr,
        cap_mib=attempt.placement.booking.cap_mib,
        placed_mib=attempt.placement.booking.placed_mib,
        activity=_activity_view(attempt.activity if track is None else track.activity or attempt.activity),
        used_s=(attempt.used_s if track is None else max(track.used_s, attempt.used_s)) or None,
        **_confined(attempt.confinement, open_to_viewer),
    )


class _Confined(TypedDict):
    mechanism: str | None
    guards: tuple[t.GuardView, ...]
    note: str


def _confined(confinement: Confinement | None, open_to_viewer: bool) -> _Confined:
    if confinement is None:
        return {"mechanism": None, "guards": (), "note": ""}
    return {
        "mechanism": confinement.mechanism,
        "guards": tuple(
            t.GuardView(rung=guard.rung, limit_mib=guard.limit_mib, how=guard.how) for guard in confinement.guards
        ),
        "note": confinement.note if open_to_viewer else "",
    }


def _activity_view(activity: Activity | None) -> t.ActivityView | None:
    return None if activity is None else msgspec.convert(activity, t.ActivityView, from_attributes=True)


def _sum(figures: Iterable[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _indices(gpus: Sequence[GpuId | str], state: State) -> tuple[int, ...]:
    return tuple(state.gpus[GpuId(gpu)].index for gpu in gpus if gpu in state.gpus)


_STATE_OF = {
    "Fault": "fault",
    "Drained": "drained",
    "Exclusive": "exclusive",
    "TasksPerGpu": "full",
    "Memory": "full",
    "WarmUp": "warming",
}
_SMALLEST = Ask(TaskId(0), 1, 1, "")  # the newcomer that asks for least: what refuses it refuses everybody


def gpu_views(state: State, now: float) -> list[t.GpuView]:
    return [_gpu_view(view, state) for view in views(state, now)]


def _gpu_view(view: GpuView, state: State) -> t.GpuView:
    refusal = refuse(_SMALLEST, view, state.rules, state.policy)
    gauges = {metric: view.gauge(metric, state.rules.gate.summary) for metric in METRICS}
    newest = view.newest
    return t.GpuView(
        gpu=view.gpu.id,
        index=view.gpu.index,
        name=view.gpu.name,
        kind=view.gpu.kind,
        state=_gpu_state(view, refusal),
        reason=refusal.sentence if refusal is not None else "",
        memory_mib=view.gpu.memory_mib,
        used_mib=view.used_mib,
        booked_mib=view.booked_mib,
        room_mib=view.room_mib,
        tasks=tuple(sorted(holder.key.task for holder in view.holders)),
        foreign=tuple(t.ForeignView(pid=use.pid, name=use.name, memory_mib=use.memory_mib) for use in view.foreign),
        risk={metric: value for metric, value in gauges.items() if value is not None},
        gpu_util=newest.gpu_util if newest is not None else None,
        power_w=newest.power_w if newest is not None else None,
        energy_j=newest.energy_j if newest is not None else None,
        idle_w=state.idle_w.get(view.gpu.id),
        metrics=view.gpu.capabilities.source,
        drained=SERVER in state.drained or view.gpu.id in state.drained,
        **{metric: view.gauge(metric, "mean") for metric in ACTIVITY_METRICS},
    )


def _gpu_state(view: GpuView, refusal: Refusal | None) -> str:
    if refusal is None:
        return "idle" if view.idle else "open"
    return _STATE_OF.get(refusal.code, "closed")
