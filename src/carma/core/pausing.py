"""Pauses of running tasks: the effects of their beginning and their end, and which tasks can be paused.

A paused task makes no progress and uses no GPU, but its memory stays booked. Time in a pause counts neither for its
time limit nor for what is learned of it. A request to stop or to save ends a pause: the program has to react to it.
"""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.commands import Command, SetPaused
from carma.core.model.events import TaskPaused, TaskUnpaused
from carma.core.model.status import Paused, Running
from carma.core.model.task import Attempt, Relief, Task
from carma.core.state import State
from carma.core.telemetry.observation import membership_changed

HOUR_S = 3600.0
CARMA = "carma"  # author of requests that do not come from a user
LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun"))
MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))  # -m


def pause(state: State, task: Task, event: TaskPaused) -> list[Command]:
    """A user's pause replaces one by CARMA, which would end by itself."""
    status = task.status
    if not isinstance(status, Running) or status.ending is not None or status.preempting is not None:
        return []
    if status.paused is not None:
        if status.paused.by == CARMA != event.by:
            by_user = replace(status.paused, by=event.by, reason=event.reason, until=None, slowed=None)
            state.put(replace(task, status=replace(status, paused=by_user)))
        return []
    paused = Paused(
        at=event.at,
        by=event.by,
        reason=event.reason,
        until=event.until,
        slowed=event.slowed,
        slowdown=event.slowdown,
    )
    state.put(replace(task, status=replace(status, paused=paused)))
    membership_changed(state, status.placement.gpus, event.at)
    state.tracks[task.key].pause_began_at = event.at
    return [SetPaused(task.key, True)]


def unpause(state: State, task: Task, event: TaskUnpaused) -> list[Command]:
    return end_pause(state, task, event.at, event.faster)[1]


def end_pause(state: State, task: Task, at: float, faster: bool | None = None) -> tuple[Task, list[Command]]:
    """The task as it continues, and the command for that; without effect if it is not paused. `faster`: see
    TaskUnpaused."""
    status = task.status
    if not isinstance(status, Running) or status.paused is None:
        return task, []
    attempt = with_pause(task, at)
    task = replace(task, attempts=(*task.attempts[:-1], attempt), status=replace(status, paused=None))
    state.put(task)
    membership_changed(state, status.placement.gpus, at)
    state.tracks[task.key].continue_at(at)
    slowed = state.tasks.get(status.paused.slowed) if status.paused.slowed is not None else None
    if slowed is not None:
        state.put(replace(slowed, relief=_relief(slowed.relief, status.paused.at, at, faster)))
    return task, [SetPaused(task.key, False)]


def with_pause(task: Task, at: float) -> Attempt:
    """The newest attempt with the pause that ends now, if it is paused."""
    attempt, paused = task.attempts[-1], task.paused
    attempt = replace(attempt, paused_s=task.paused_s(at))
    if paused is None or paused.slowed is None:
        return attempt
    by_carma_s = attempt.paused_by_carma_s + max(0.0, at - paused.at)
    return replace(attempt, paused_by_carma_s=by_carma_s, paused_for=(*attempt.paused_for, paused.slowed))


def _relief(before: Relief | None, began_at: float, at: float, faster: bool | None) -> Relief:
    relief = before if before is not None and began_at < before.since + HOUR_S else Relief(since=began_at)
    return Relief(
        since=relief.since,
        seconds=relief.seconds + max(0.0, at - began_at),
        confirmed=faster is True or (faster is None and before is not None and before.confirmed),
        refuted=faster is False or (before is not None and before.refuted),
    )


def unpausable(state: State, task: Task) -> str | None:
    """Why the task must not be paused, as a clause; None if it may be. Processes that work together wait for each other
    with time limits (NCCL ends the task after some minutes)."""
    if task.spec.gpus > 1:
        return f"it runs on {task.spec.gpus} GPUs"
    words = {part.rpartition("/")[2] for word in task.spec.command for part in word.split()}  # also of `sh -c "..."`
    launcher = min(words & (LAUNCHERS | MODULES), default=None)
    if launcher is not None:
        return f"{launcher} starts several processes"
    processes = gpu_processes(state, task)
    return f"{processes} of its processes use the GPU" if processes is not None and processes > 1 else None


def gpu_processes(state: State, task: Task) -> int | None:
    """Its processes in the newest samples of its GPUs; None if processes are not listed."""
    pids: set[int] = set()
    for gpu in task.attempts[-1].placement.gpus:
        live = state.live.get(gpu)
        sample = None if live is None else live.newest_memory
        if sample is None or sample.processes is None:
            return None
        pids.update(use.pid for use in sample.processes if use.attempt == task.key)
    return len(pids)
