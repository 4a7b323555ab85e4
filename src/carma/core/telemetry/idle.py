"""Idle holders: tasks that hold memory on all of their GPUs and have not used the SMs for `idle.after_s`.

Unknown activity counts as use. The activity of one task on a shared GPU is estimated (attribution.py); the estimate of
an idle task stays below IDLE_PRESSURE while a neighbour keeps the GPU busy.
"""

from __future__ import annotations

from msgspec.structs import replace

from carma.core import notices
from carma.core.model.events import IdleNoted, IdleOver, StopRequested
from carma.core.model.outcome import Cancelled
from carma.core.model.status import Idle, Running
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import GpuSample, TaskId
from carma.core.state import State, in_order
from carma.core.telemetry.measurements import Members
from carma.core.telemetry.pace import regroup
from carma.core.telemetry.window import given

IDLE_PRESSURE = 0.02  # SM activity of 2 %: a process that waits launches no kernels

IdleEvent = IdleNoted | IdleOver | StopRequested


def observe(members: Members, before: GpuSample | None, sample: GpuSample, stale_s: float) -> None:
    """After a gap in the samples the time begins again."""
    gap = before is None or before.fault is not None or sample.at - before.at > stale_s
    unknown = gap or given(sample, "sm_active") is None
    for member in members.present:
        seen = member.seen
        if unknown or seen.busy_at is None or seen.own.pressure >= IDLE_PRESSURE:
            seen.busy_at = sample.at
    for member in members.resting:
        member.seen.busy_at = None


def check(state: State, task_id: TaskId) -> None:
    """Update the index of tasks with a due event after a sample."""
    if event_of(state, task_id, state.now) is not None:
        state.idle.add(task_id)
    else:
        state.idle.discard(task_id)


def events(state: State, now: float) -> list[IdleEvent]:
    due = (event_of(state, task_id, now) for task_id in in_order(state.idle, state.active))
    return [event for event in due if event is not None]


def event_of(state: State, task_id: TaskId, now: float) -> IdleEvent | None:
    """The event that is due for an active task."""
    rules, task = state.rules.idle, state.tasks[task_id]
    status, since = task.status, _since(state, task_id)
    if not isinstance(status, Running) or since is None or status.ending is not None or status.paused is not None:
        return None
    noted = status.idle
    if noted is None:
        is_due = rules.after_s > 0 and _observed_until(state, task_id) - since >= rules.after_s
        return IdleNoted(now, task_id, since, rules.action) if is_due else None
    if since > noted.at:  # also after a restart, which observed nothing yet
        return IdleOver(now, task_id)
    if noted.action == "end" and now - noted.at >= rules.warn_s:
        held = show_s(now - noted.since)
        reason = f"it held GPU memory for {held} without using the SMs (idle.action)"
        return StopRequested(now, task_id, Cancelled("carma", reason), state.rules.stopping.grace_of(task.spec))
    return None


def apply(state: State, task: Task, event: IdleNoted | IdleOver) -> None:
    assert isinstance(task.status, Running)
    found = None
    if isinstance(event, IdleNoted):
        found = Idle(event.since, event.at, event.action)
        task = notices.with_notice(task, ("idle",), event.at, state.rules.notify)
    state.put(replace(task, status=replace(task.status, idle=found)))
    regroup(state, task.attempts[-1].placement.gpus, event.at)


def _since(state: State, task_id: TaskId) -> float | None:
    """Since when the task has not used the SMs of any of its GPUs; None if it does not hold memory on all of them."""
    track = state.tracks.get(state.active[task_id])
    times = [seen.busy_at for seen in track.on.values()] if track is not None else []
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None


def _observed_until(state: State, task_id: TaskId) -> float:
    """The time of the newest sample of all of its GPUs: what came after it is not known."""
    newest = [state.live_of(gpu).window.newest for gpu in state.tracks[state.active[task_id]].on]
    return min((sample.at for sample in newest if sample is not None), default=0.0)
