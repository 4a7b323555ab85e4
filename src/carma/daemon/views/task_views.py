"""Tasks as the API shows them. Reads only. The command of another user's task, and where it runs, is left out here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from carma.core.model import outcome as o
from carma.core.model import status as s
from carma.core.model.task import Attempt, Task
from carma.core.model.units import show_s
from carma.core.model.values import AttemptKey, Estimate, GpuId, TaskId, TaskSpec
from carma.core.pausing import CARMA
from carma.core.scheduling.eligibility import Waiting, ask_of
from carma.core.scheduling.explanation import waiting
from carma.core.state import State
from carma.core.telemetry import step_rates
from carma.daemon.auth import Identity
from carma.daemon.views.advice import advice
from carma.daemon.views.story import without_words
from carma.launch.attempt_files import AttemptFiles
from carma.launch.output_paths import named_outputs, program_name
from carma.wire import api_types as t
from carma.wire.short_reasons import short_reason

V = TypeVar("V", bound=msgspec.Struct)
N = TypeVar("N")
HIDDEN = "-"
_FROM_SPEC = ("gpu_memory_mib", "exclusive", "priority", "begin_at", "time_limit_s", "threads_percent")
_FROM_NEWEST_ATTEMPT = ("gpus", "booking_mib", "observed_mib", "used_mib", "started_at", "mechanism", "progress")
# The short codes that users of other queues know.
OUTCOME_CODES: dict[type[o.Outcome], str] = {
    o.Succeeded: "CD",
    o.Failed: "F",
    o.OutOfMemory: "OOM",
    o.Cancelled: "CA",
    o.TimedOut: "TO",
    o.LaunchFailed: "LF",
    o.Lost: "LO",
    o.Disrupted: "DI",
    o.Preempted: "PR",
    o.NeverFits: "NF",
}


class ViewContext(NamedTuple):
    """What every view depends on."""

    state: State
    now: float
    who: Identity  # who reads the view
    log_dir: Path  # of CARMA's own logs
    stage: Callable[[TaskId], str] = lambda _task: ""  # the progress of a task's estimate


def code_of(status: s.Status) -> str:
    match status:
        case s.Estimating(held=True) | s.Queued(held=True):
            return "H"
        case s.Estimating() | s.Queued() | s.Ended() | s.Recovering():
            return "PD"
        case s.Running(paused=paused) if paused is not None:
            return "S"
        case s.Starting(ending=ending) | s.Running(ending=ending):
            return "R" if ending is None else "CG"
        case s.Finished(outcome=outcome):
            return OUTCOME_CODES[type(outcome)]
        case _:
            assert_never(status)


def task_views(tasks: Sequence[Task], context: ViewContext) -> Iterator[t.TaskView]:
    """Made one by one, so that the caller can pause between them."""
    reasons = reasons_of(tasks, context)
    return (task_view(task, context, reasons.get(task.id)) for task in tasks)


def reasons_of(tasks: Iterable[Task], context: ViewContext) -> dict[TaskId, Waiting]:
    """Why tasks wait, in one pass over the queue, which costs hardly more than the reason of one task."""
    state = context.state
    ids = [task.id for task in tasks if isinstance(task.status, s.Pending) and task.id in state.tasks]
    found = waiting(state, context.now, ids) if ids else {}
    for task_id, why in found.items():
        stage = context.stage(task_id) if isinstance(state.tasks[task_id].status, s.Estimating) else ""
        if stage:
            found[task_id] = replace(why, sentence=f"{why.sentence}: {stage}")
    return found


def task_view(task: Task, context: ViewContext, why: Waiting | None) -> t.TaskView:
    may_see, spec, status = context.who.may_see(task), task.spec, task.status
    attempts = tuple(_attempt_view(task, attempt, context, may_see) for attempt in task.attempts)
    newest = attempts[-1] if attempts else None
    outcome = status.outcome if isinstance(status, s.Finished) else None
    asked = status.preempting if isinstance(status, s.Running) else None
    reason_code, reason = _reason(task, why, may_see, context.now)
    view = t.TaskView(
        **_spec_fields(spec, may_see),
        **_newest_fields(newest, context),
        id=task.id,
        user=task.owner.name,
        uid=task.owner.uid,
        state=s.state_name(status),
        code=code_of(status),
        outcome=_outcome(outcome, may_see),
        exit_code=o.exit_code(outcome) if outcome is not None else None,
        reason=reason,
        reason_code=reason_code,
        reason_short=short_reason(reason) if why is not None else "",
        held=isinstance(status, s.Estimating | s.Queued) and status.held,
        estimate=_estimate_view(task.estimate, may_see),
        needs_mib=_needs_mib(task, context),
        attempts=attempts,
        submitted_at=task.submitted_at,
        retried_at=task.retried_at,
        ended_at=status.at if isinstance(status, s.Finished) else None,
        waited_s=_waited_s(task, context.now),
        reserved_start_at=why.reserved_start_at if why is not None else None,
        idle_since=status.idle.since if isinstance(status, s.Running) and status.idle is not None else None,
        asked_to_save_at=asked.at if asked is not None else None,
        paused_at=task.paused.at if task.paused is not None else None,
        energy_j=_known_sum(attempt.energy_j for attempt in attempts),
    )
    return replace(view, advice=advice(view)) if outcome is not None else view


def _spec_fields(spec: TaskSpec, may_see: bool) -> dict[str, Any]:
    return {
        **_fields(spec, _FROM_SPEC),
        "name": spec.name or (program_name(spec.command) if may_see else HIDDEN),
        "command": spec.command if may_see else (HIDDEN,),
        "directory": spec.directory if may_see else HIDDEN,
        "comment": spec.comment if may_see else "",
        "gpus_wanted": spec.gpus,
        "after": tuple(f"{dependency.when}:{dependency.task}" for dependency in spec.after),
        "array": f"{spec.array.array}[{spec.array.index}]" if spec.array is not None else None,
        "mechanism_asked": spec.mechanism,
        "checkpoint_signal": spec.checkpoint.signal if spec.checkpoint is not None else None,
        "checkpoint_grace_s": spec.checkpoint.grace_s if spec.checkpoint is not None else None,
    }


def _newest_fields(newest: t.AttemptView | None, context: ViewContext) -> dict[str, Any]:
    if newest is None:
        return {"gpus": ()}
    gpus = context.state.gpus
    return {
        **_fields(newest, _FROM_NEWEST_ATTEMPT),
        "gpu_indices": tuple(gpus[GpuId(gpu)].index for gpu in newest.gpus if gpu in gpus),
        "sm_active": newest.activity.sm_active if newest.activity is not None else None,
        "ran_s": _ran_s(newest, context.now),
    }


def _fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def mirrored(kind: type[V], source: object, **own: object) -> V:
    """A view whose fields, except `own`, have the names and values of the source's."""
    return kind(**_fields(source, (name for name in kind.__struct_fields__ if name not in own)), **own)


def _needs_mib(task: Task, context: ViewContext) -> int | None:
    if not isinstance(task.status, s.Pending) or isinstance(task.status, s.Estimating):
        return None
    return ask_of(task, context.state).memory_mib


def _waited_s(task: Task, now: float) -> float:
    """Since its submission or the last retry by its user, without its attempts."""
    since = task.retried_at or task.submitted_at
    until = task.status.at if isinstance(task.status, s.Finished) else now
    newer = (one for one in task.attempts if one.placed_at >= since)
    spans = ((one.ended_at or until) - (one.started_at or one.placed_at) for one in newer)
    return round(max(0.0, until - since - sum(spans)), 3)


def _ran_s(attempt: t.AttemptView, now: float) -> float | None:
    """Without pauses."""
    if attempt.started_at is None:
        return None
    until = now if attempt.ended_at is None else attempt.ended_at
    return max(0.0, until - attempt.started_at - attempt.paused_s)


def _reason(task: Task, why: Waiting | None, may_see: bool, now: float) -> tuple[str, str]:
    """(code, sentence): why it waits, how it ended, what it was asked to do; both empty while it just runs."""
    match task.status:
        case s.Finished(outcome=outcome):
            return OUTCOME_CODES[type(outcome)], o.describe(outcome if may_see else without_words(outcome))
        case s.Starting(ending=ending) | s.Running(ending=ending) if ending is not None:
            return "Stopping", f"is being stopped: {o.describe(ending if may_see else without_words(ending))}"
        case s.Running(preempting=asked) if asked is not None:
            public = may_see or asked.room_for is not None  # a reason that a user wrote is for the owner only
            why_asked = f": {asked.reason}" if asked.reason and public else ""
            ago = show_s(max(0.0, now - asked.at))
            return "Saving", f"asked to save a checkpoint {ago} ago by {asked.by}{why_asked}"
        case s.Running(paused=paused) if paused is not None:
            public = may_see or paused.by == CARMA  # a reason that a user wrote is for the owner only
            left = "" if paused.until is None else f"; for at most {show_s(max(0.0, paused.until - now))} more"
            why_paused = f": {paused.reason}" if paused.reason and public else ""
            return "Paused", f"paused by {paused.by} {show_s(max(0.0, now - paused.at))} ago{why_paused}{left}"
        case s.Running(idle=idle) if idle is not None:
            ends = "; it is ended unless it uses them again" if idle.action == "end" else ""
            return "Idle", f"has held GPU memory for {show_s(max(0.0, now - idle.since))} without using the SMs{ends}"
        case s.Running(stayed_at=stayed_at) if stayed_at is not None:
            ago = show_s(max(0.0, now - stayed_at))
            return "Stayed", f"was asked to save a checkpoint and did not end in time, {ago} ago"
        case _:
            return (why.code, why.sentence) if why is not None else ("", "")


def _outcome(outcome: o.Outcome | None, may_see: bool) -> t.Outcome | None:
    if outcome is None:
        return None
    made: t.Outcome = msgspec.to_builtins(outcome if may_see else without_words(outcome))
    return made


def _estimate_view(estimate: Estimate | None, may_see: bool) -> t.EstimateView | None:
    if estimate is None:
        return None
    demand = msgspec.to_builtins(estimate.demand) if estimate.demand is not None else {}
    view = mirrored(t.EstimateView, estimate, demand=demand)
    return view if may_see else replace(view, rests_on="", warnings=())


def _attempt_view(task: Task, attempt: Attempt, context: ViewContext, may_see: bool) -> t.AttemptView:
    key, booking = AttemptKey(task.id, attempt.number), attempt.placement.booking
    track = context.state.tracks.get(key)
    stdout, stderr = _output_paths(task, key, context.log_dir) if may_see else ("", "")
    seen_mib = _known((attempt.observed_mib, track.peak_mib if track is not None else None))
    activity = attempt.activity if track is None else track.activity or attempt.activity
    confinement = attempt.confinement
    return t.AttemptView(
        **_fields(attempt, ("number", "decision", "placed_at", "started_at", "ended_at", "pid", "blame")),
        **_fields(booking, ("alone", "cap_mib", "placed_mib")),
        gpus=attempt.placement.gpus,
        booking_mib=booking.memory_mib,
        booking_source=booking.source,
        observed_mib=max(seen_mib, default=None),
        used_mib=None if track is None else max(_known(seen.now_mib for seen in track.on.values()), default=None),
        energy_j=attempt.own_energy_j if track is None or track.energy_j is None else track.energy_j,
        outcome=_outcome(attempt.outcome, may_see),
        stdout=stdout,
        stderr=stderr,
        activity=None if activity is None else mirrored(t.ActivityView, activity),
        # The source is that of the GPU now, so it says nothing of an attempt that has ended.
        activity_inferred=track is not None
        and any(
            gpu in context.state.gpus and context.state.gpus[gpu].capabilities.source == "inferred"
            for gpu in attempt.placement.gpus
        ),
        used_s=(attempt.used_s if track is None else max(track.used_s, attempt.used_s)) or None,
        mechanism=None if confinement is None else confinement.mechanism,
        guards=() if confinement is None else tuple(mirrored(t.GuardView, guard) for guard in confinement.guards),
        note=confinement.note if confinement is not None and may_see else "",
        progress=progress_view(task, attempt, context.state),
        paused_s=task.paused_s(context.now) if attempt is task.attempts[-1] else attempt.paused_s,
    )


def progress_view(task: Task, attempt: Attempt, state: State) -> t.ProgressView:
    track = state.tracks.get(AttemptKey(task.id, attempt.number))
    stored = attempt.progress
    if track is None:
        steps, last_at, per_s = (None if stored is None else stored.steps), None, stored.per_s if stored else None
    else:
        newest = track.step_record.newest
        steps = newest.steps if newest is not None else stored.steps if stored is not None else None
        last_at = newest.at if newest is not None else None
        per_s = step_rates.rate_now(state, track, state.now)
    slowed = step_rates.slowdown(state, task, attempt)
    return t.ProgressView(
        steps=steps,
        steps_per_s=step_rates.rounded(per_s),
        alone_steps_per_s=step_rates.rounded(step_rates.alone_rate(task, attempt, track)),
        last_step_at=last_at,
        slowdown=None if slowed is None else round(slowed.value, 3),
        inferred=slowed is not None and slowed.inferred,
    )


def _output_paths(task: Task, key: AttemptKey, log_dir: Path) -> tuple[str, str]:
    stdout, stderr = named_outputs(key, task.owner, task.spec)
    own = AttemptFiles(log_dir)
    return stdout or own.log_path(key, "stdout"), stderr or own.log_path(key, "stderr")


def _known_sum(figures: Iterable[float | None]) -> float | None:
    """The sum of the known figures; None if none is known."""
    known = _known(figures)
    return sum(known) if known else None


def _known(figures: Iterable[N | None]) -> list[N]:
    return [figure for figure in figures if figure is not None]
