"""What the state says now, as plain values: (metric, values of its labels, value). Reads only, on the event loop.

A figure that is not measured gives no reading, never 0. A task has readings only while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from carma import __version__
from carma.core.model.status import Finished, Running, state_name
from carma.core.model.task import Task
from carma.core.scheduling.explanation import waiting
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.snapshot import views
from carma.core.state import SERVER, State
from carma.core.telemetry.attribution import sm_by_attempt

MIB = 1024 * 1024
STATES = ("estimating", "queued", "starting", "running", "recovering")
_ACTIVITIES = ("sm_active", "sm_occupancy", "dram_active")
Reading = tuple[str, tuple[str, ...], float]


def read(state: State, now: float) -> list[Reading]:
    found: list[tuple[str, tuple[str, ...], float | None]] = [
        ("carma_build_info", (__version__, state.policy.name), 1.0),
        *_of_tasks(state, now),
    ]
    for view in views(state, now):
        found.extend(_of_gpu(state, view))
        found.extend(_of_tasks_on(state, view))
    for task_id in state.active:
        found.extend(_of_running(state, state.tasks[task_id]))
    return [(name, labels, value) for name, labels, value in found if value is not None]


def _of_tasks(state: State, now: float) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    states = Counter(state_name(task.status) for task in state.tasks.values() if not isinstance(task.status, Finished))
    for name in STATES:
        yield "carma_tasks", (name,), float(states[name])
    reasons = Counter(why.code for why in waiting(state, now).values())
    for code, count in reasons.items():
        yield "carma_waiting_tasks", (code,), float(count)


def _of_gpu(state: State, view: GpuView) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    gpu, newest, live = view.gpu, view.newest, state.live.get(view.gpu.id)
    at = (str(gpu.index),)
    yield "carma_gpu_info", (*at, gpu.id, gpu.name), 1.0
    yield "carma_gpu_up", at, float(newest is not None and newest.fault is None)
    yield "carma_gpu_drained", at, float(SERVER in state.drained or gpu.id in state.drained)
    yield "carma_gpu_memory_booked_bytes", at, float(view.booked_mib * MIB)
    yield "carma_gpu_memory_total_bytes", at, float(gpu.memory_mib * MIB)
    yield "carma_gpu_memory_used_bytes", at, _bytes(view.used_mib)
    if newest is None or live is None:
        return
    yield "carma_gpu_power_watts", at, newest.power_w
    yield "carma_gpu_energy_joules_total", at, newest.energy_j
    for name in _ACTIVITIES:
        yield f"carma_gpu_{name}_ratio", at, live.window.mean(name, live.since)


def _of_tasks_on(state: State, view: GpuView) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    live = state.live.get(view.gpu.id)
    shares = sm_by_attempt(live) if live is not None and view.newest is not None else {}
    for holder in view.holders:
        task = state.tasks[holder.key.task]
        if isinstance(task.status, Running):
            labels = (str(task.id), task.owner.name, str(view.gpu.index))
            yield "carma_task_info", labels, 1.0
            yield "carma_task_booked_bytes", labels, float(holder.booking_mib * MIB)
            yield "carma_task_memory_bytes", labels, _bytes(holder.observed_mib)
            yield "carma_task_sm_ratio", labels, shares.get(holder.key)


def _of_running(state: State, task: Task) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    track = state.tracks.get(task.key)
    if track is not None and isinstance(task.status, Running):
        labels, newest = (str(task.id), task.owner.name), track.step_record.newest
        yield "carma_task_energy_joules_total", labels, track.energy_j
        yield "carma_task_steps_total", labels, None if newest is None else float(newest.steps)


def _bytes(mib: int | None) -> float | None:
    return None if mib is None else float(mib * MIB)
