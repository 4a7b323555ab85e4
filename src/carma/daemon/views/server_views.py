"""GPUs and users as the API shows them. Reads only.

An administrator sees all users, other users only themselves: what a user had and may have is private.
"""

from __future__ import annotations

from carma.core.model.decision import Ask, Refusal
from carma.core.model.status import Running
from carma.core.model.task import Task
from carma.core.model.values import ACTIVITY_METRICS, TaskId
from carma.core.scheduling.fairness import Account
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import refuse
from carma.core.scheduling.quota import limits_of
from carma.core.scheduling.snapshot import views
from carma.core.state import SERVER, State
from carma.core.telemetry.inferred_activity import source_of
from carma.core.telemetry.window import METRICS
from carma.daemon.auth import Identity
from carma.daemon.views.task_views import mirrored, progress_view
from carma.wire import api_types as t
from carma.wire.report_types import UserView

_STATES = {
    "Fault": "fault",
    "Drained": "drained",
    "Exclusive": "exclusive",
    "TasksPerGpu": "full",
    "Memory": "full",
    "WarmUp": "warming",
}  # by the code of the refusal
_SMALLEST = Ask(TaskId(0), 1, 1, "")  # the smallest possible task: a GPU that refuses it refuses every task


def gpu_views(state: State, now: float) -> list[t.GpuView]:
    return [_gpu_view(view, state) for view in views(state, now)]


def _gpu_view(view: GpuView, state: State) -> t.GpuView:
    refusal = refuse(_SMALLEST, view, state.rules, state.policy)
    gauges = {metric: view.gauge(metric, state.rules.gate.summary) for metric in METRICS}
    gpu, newest = view.gpu, view.newest
    return t.GpuView(
        gpu=gpu.id,
        index=gpu.index,
        name=gpu.name,
        kind=gpu.kind,
        state=_gpu_state(view, refusal),
        reason=refusal.sentence if refusal is not None else "",
        memory_mib=gpu.memory_mib,
        used_mib=view.used_mib,
        booked_mib=view.booked_mib,
        room_mib=view.room_mib,
        tasks=tuple(task.id for task in _tasks_on(view, state)),
        idle_tasks=tuple(task.id for task in _tasks_on(view, state) if _is_idle(task)),
        foreign=tuple(mirrored(t.ForeignView, use) for use in view.foreign),
        risk={metric: value for metric, value in gauges.items() if value is not None},
        gpu_util=newest.gpu_util if newest is not None else None,
        power_w=newest.power_w if newest is not None else None,
        energy_j=newest.energy_j if newest is not None else None,
        idle_w=state.idle_w.get(gpu.id),
        metrics=gpu.capabilities.source,
        drained=SERVER in state.drained or gpu.id in state.drained,
        activity_source=source_of(gpu, newest),
        paused=tuple(task.id for task in _tasks_on(view, state) if task.paused is not None),
        progress={task.id: progress_view(task, task.attempts[-1], state) for task in _tasks_on(view, state)},
        **{metric: _mean(state, view, metric) for metric in ACTIVITY_METRICS},
    )


def _mean(state: State, view: GpuView, metric: str) -> float | None:
    live = state.live.get(view.gpu.id)
    return None if live is None else live.window.mean(metric, live.since)


def _tasks_on(view: GpuView, state: State) -> list[Task]:
    return [state.tasks[task] for task in sorted(holder.key.task for holder in view.holders)]


def _is_idle(task: Task) -> bool:
    return isinstance(task.status, Running) and task.status.idle is not None


def _gpu_state(view: GpuView, refusal: Refusal | None) -> str:
    if refusal is None:
        return "idle" if view.idle else "open"
    return _STATES.get(refusal.code, "closed")


def user_views(state: State, who: Identity, now: float) -> list[UserView]:
    """Users in the order of their turns."""
    accounts = {**state.accounts.by_uid}
    accounts.setdefault(who.uid, Account(who.name))
    shown = [_view(state, uid, one, now) for uid, one in accounts.items() if who.admin or uid == who.uid]
    return sorted(shown, key=lambda user: (user.level, user.user))


def _view(state: State, uid: int, account: Account, now: float) -> UserView:
    memory_h, sm_h = state.accounts.usage(account, now)
    limits = limits_of(state.rules.quota, account.name)
    memory_mib = sum(gpu.memory_mib for gpu in state.usable)
    return UserView(
        user=account.name,
        uid=uid,
        share=state.accounts.share_of(account.name),
        memory_h=memory_h,
        sm_h=sm_h,
        level=state.accounts.level(uid),
        running=account.held.tasks,
        gpus=account.held.gpus,
        booked_mib=account.held.booked_mib,
        waiting=account.waiting,
        running_limit=limits.running,
        gpus_limit=limits.gpus,
        memory_limit_mib=None if limits.memory_share is None else int(limits.memory_share * memory_mib),
        waiting_limit=limits.waiting,
    )
