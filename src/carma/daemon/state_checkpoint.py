"""The state as a checkpoint for the store, and back. A restart loads the last one and steps the events after it."""

from __future__ import annotations

from collections.abc import Iterable

from carma.core.model.settings import Rules
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import GpuId, TaskId
from carma.core.ports import Checkpoint
from carma.core.scheduling.policy import Policy
from carma.core.state import State
from carma.core.telemetry import step_rates
from carma.core.telemetry.measurements import Track
from carma.core.telemetry.pace import regroup


def restore(rules: Rules, policy: Policy, checkpoint: Checkpoint | None) -> State:
    """The state as the checkpoint has it; the events after it are stepped by the caller."""
    state = State(rules, policy)
    if checkpoint is None:
        return state
    state.now = checkpoint.at
    state.set_gpus(checkpoint.gpus)
    state.drained = dict(checkpoint.drained)
    state.last_gpu = checkpoint.last_gpu
    state.accounts.load(checkpoint.usage, checkpoint.at)
    for task in checkpoint.tasks:
        state.put(task)
    state.overtaken = {TaskId(task): count for task, count in checkpoint.overtaken.items()}
    for task_id, key in state.active.items():
        attempt = state.tasks[task_id].attempts[-1]
        state.tracks[key] = track = Track(attempt.placement.gpus, attempt.observed_mib)
        estimate = state.tasks[task_id].estimate
        track.alone_s = estimate.runtime_s if estimate is not None else None
        track.restore(attempt.energy_j, attempt.activity, attempt.used_s, attempt.alone)
        step_rates.restore(track, attempt.progress)
        if attempt.started_at is not None:
            pace = attempt.alone.pace if attempt.alone is not None else 1.0
            paused = state.tasks[task_id].paused
            track.paused_s, track.pause_began_at = attempt.paused_s, None if paused is None else paused.at
            track.begin(attempt.started_at)
            track.done_s = pace * track.ran_s(state.now)
            track.paced_at = state.now
    state.corrections = {one.command: one for one in checkpoint.corrections}
    state.idle_w = {GpuId(gpu): watts for gpu, watts in checkpoint.idle_w.items()}
    regroup(state, state.gpus, state.now)
    for gpu, watts in checkpoint.empty_w.items():
        state.live_of(GpuId(gpu)).empty_w = watts
    return state


def adopt(state: State) -> None:
    """Marks the running attempts at the end of a replay: an earlier daemon started them. An attempt that had settled
    then stays settled, as it would have without the restart."""
    for task_id, key in state.active.items():
        for seen in state.tracks[key].on.values():
            seen.adopted = True
            if state.tasks[task_id].attempts[-1].settled:
                seen.settled_at = state.now
        state.settled.add(task_id)
        for gpu in state.tracks[key].on:
            state.touch(gpu)


def checkpoint(state: State, sequence: int) -> tuple[Checkpoint, tuple[Task, ...]]:
    """The state for the store, and the finished tasks that may leave memory for the archive."""
    kept: list[Task] = []
    leaving: list[Task] = []
    for task in state.tasks.values():
        needed = task.id in state.dependents or bool(task.notices) or _shown(state, task.id)
        done = isinstance(task.status, Finished) and not needed
        (leaving if done else kept).append(task)
    saved = Checkpoint(
        sequence=sequence,
        at=state.now,
        tasks=tuple(kept),
        gpus=tuple(state.gpus.values()),
        drained=dict(state.drained),
        last_gpu=state.last_gpu,
        overtaken={int(task): count for task, count in state.overtaken.items()},
        idle_w={str(gpu): watts for gpu, watts in state.idle_w.items()},
        empty_w={str(gpu): watts for gpu, watts in state.empty_w().items()},
        usage=state.accounts.saved(state.now),
        corrections=tuple(state.corrections.values()),
    )
    return saved, tuple(leaving)


def _shown(state: State, task_id: TaskId) -> bool:
    """Whether the newest sample of a GPU shows its processes: without the task they would count as foreign."""
    return any(gpu in state.gpus for gpu in state.shown_on.get(task_id, ()))


def forget(state: State, finished: Iterable[Task]) -> None:
    """Drop archived tasks from memory, once the store has them."""
    for task in finished:
        state.drop(task.id)
