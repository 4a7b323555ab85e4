"""The invariants of a state. Tests check them after every step; each returned sentence is a defect."""

from __future__ import annotations

from carma.core.model.outcome import Preempted
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.scheduling.fair_order import FairQueue
from carma.core.scheduling.fairness import NONE_HELD, waits
from carma.core.state import State, due_at, queue_key
from carma.core.telemetry.booking_shrink import shrink_of
from carma.core.telemetry.idle import event_of
from carma.core.telemetry.observation import memory_growth
from carma.core.telemetry.watchdog import stops_on


def validate(state: State) -> list[str]:
    return [*_indices(state), *_tasks(state), *_gpus(state), *_users(state)]


def _indices(state: State) -> list[str]:
    tasks = state.tasks.values()
    queued = sorted(queue_key(t) for t in tasks if isinstance(t.status, Queued) and not t.status.held)
    estimating = sorted(queue_key(t) for t in tasks if isinstance(t.status, Estimating) and not t.status.held)
    active = {t.id: t.key for t in tasks if isinstance(t.status, Starting | Running)}
    between = {t.id for t in tasks if isinstance(t.status, Ended | Recovering)}
    asked = {t.id for t in tasks if isinstance(t.status, Running) and t.status.preempting is not None}
    held = {(gpu, key) for gpu, keys in state.on_gpu.items() for key in keys}
    wanted = {
        (gpu, t.key) for t in tasks if isinstance(t.status, Starting | Running) for gpu in t.status.placement.gpus
    }
    impossible = {t.id: outcome for t in tasks if (outcome := state.outcome_if_impossible(t)) is not None}
    deadlines = sorted((at, t.id) for t in tasks if (at := due_at(t, state.rules)) is not None)
    indices: dict[str, tuple[object, object]] = {
        "queued": (state.queue, queued),
        "estimating": (state.estimating, estimating),
        "active": (state.active, active),
        "between attempts": (state.between_attempts, between),
        "asked to save": (state.preempting, asked),
        "tracked": (set(state.tracks), set(active.values())),
        "pauses of tracks": (
            {key: track.pause_began_at for key, track in state.tracks.items() if track.pause_began_at is not None},
            {t.key: t.paused.at for t in tasks if t.paused is not None},
        ),
        "held by GPUs": (held, wanted),
        "impossible": (state.impossible, impossible),
        "deadlines": (state.deadlines, deadlines),
    }
    broken = [f"{what}: {index}, the tasks give {given}" for what, (index, given) in indices.items() if index != given]
    return [*broken, *_due(state)]


def _due(state: State) -> list[str]:
    """The indices that `propose` reads."""
    broken: list[str] = []
    shown = {(task, gpu) for gpu, live in state.live.items() for task in live.shown}
    if not shown <= {(task, gpu) for task, gpus in state.shown_on.items() for gpu in gpus}:
        broken.append(f"GPUs show the tasks of {shown}, known are {state.shown_on}")
    grown = {task for task in state.active if memory_growth(state, task, state.now) is not None}
    if not grown <= state.grown:
        broken.append(f"the memory of {grown} is to be stored, known are {state.grown}")
    idle = {task for task in state.active if event_of(state, task, state.now) is not None}
    if not idle <= state.idle:
        broken.append(f"{idle} have become idle holders or are none any more, known are {state.idle}")
    if state.rules.sharing.watchdog:
        due = {gpu for gpu in state.on_gpu if stops_on(state, gpu, state.now)}
        if not due <= state.over_booking:
            broken.append(f"the watchdog stops tasks on {due}, known are {state.over_booking}")
        shrunk = {task for task in state.active if shrink_of(state, task, state.now) is not None}
        if state.rules.memory.shrink and not shrunk <= state.settled:
            broken.append(f"the bookings of {shrunk} may shrink, known are {state.settled}")
    return broken


def _tasks(state: State) -> list[str]:
    broken: list[str] = []
    for task in state.tasks.values():
        numbers = [attempt.number for attempt in task.attempts]
        if numbers != list(range(1, len(numbers) + 1)):
            broken.append(f"task {task.id} has attempts {numbers}")
        unended = [attempt.number for attempt in task.attempts if attempt.outcome is None]
        expected = numbers[-1:] if isinstance(task.status, Starting | Running) else []
        if unended != expected:
            broken.append(f"task {task.id} is {task.status!r} and its attempts {unended} have no outcome")
        if isinstance(task.status, Starting | Running):
            gpus = task.status.placement.gpus
            if len(set(gpus)) != len(gpus) or len(gpus) != task.spec.gpus:
                broken.append(f"task {task.id} wants {task.spec.gpus} distinct GPUs and has {gpus}")
        reacts = isinstance(task.status, Running) and (task.status.ending or task.status.preempting)
        if task.paused is not None and reacts:
            broken.append(f"task {task.id} is paused, so it cannot react: {task.status!r}")
        if isinstance(task.status, Finished) and task.id in state.overtaken:
            broken.append(f"task {task.id} is finished and counted as overtaken")
        broken.extend(_preempted(task))
    return broken


def _preempted(task: Task) -> list[str]:
    """Checks that only tasks with a checkpoint signal are preempted, and that a preemption is never the end of a
    task."""
    broken: list[str] = []
    asked = isinstance(task.status, Running) and task.status.preempting is not None
    left = any(isinstance(attempt.outcome, Preempted) for attempt in task.attempts)
    if (asked or left) and task.spec.checkpoint is None:
        broken.append(f"task {task.id} declares no checkpoint and was asked to save: {task.status!r}")
    if isinstance(task.status, Finished) and isinstance(task.status.outcome, Preempted):
        broken.append(f"task {task.id} is finished by being preempted")
    if (
        isinstance(task.status, Ended | Recovering)
        and task.status.held
        and not isinstance(task.attempts[-1].outcome, Preempted)
    ):
        broken.append(f"task {task.id} is held after {task.attempts[-1].outcome!r}")
    return broken


def _gpus(state: State) -> list[str]:
    broken: list[str] = []
    for gpu_id, keys in state.on_gpu.items():
        gpu = state.gpus.get(gpu_id)
        if gpu is None:
            continue
        booked = sum(placement.booking.memory_mib for placement in keys.values())
        if booked > gpu.memory_mib:
            broken.append(f"GPU {gpu_id} has {booked} MiB booked of {gpu.memory_mib}")
        alone = [key for key, placement in keys.items() if placement.booking.alone]
        if alone and len(keys) > 1:
            broken.append(f"GPU {gpu_id}: {alone} wanted to be alone among {list(keys)}")
        if len(keys) > state.rules.placement.tasks_per_gpu:
            broken.append(f"GPU {gpu_id} has {len(keys)} tasks")
    return broken


def _users(state: State) -> list[str]:
    broken: list[str] = []
    for uid in {task.owner.uid for task in state.tasks.values()} | state.accounts.by_uid.keys():
        own = [task for task in state.tasks.values() if task.owner.uid == uid]
        waiting = sum(waits(task) for task in own)
        if waiting != state.accounts.waiting(uid):
            broken.append(f"user {uid} has {waiting} tasks that wait; the account says {state.accounts.waiting(uid)}")
        # The size of a lost GPU is known only from before, so GPUs are not compared here.
        held = sum(state.accounts.by_task.get(task.id, NONE_HELD).tasks for task in own)
        active = sum(isinstance(task.status, Starting | Running) for task in own)
        if not held == active == state.accounts.held(uid).tasks:
            broken.append(f"user {uid} runs {active} tasks; the account has {held}, {state.accounts.held(uid)} in all")
    if state.fair_queue is not None:
        fair = FairQueue()
        for task in state.tasks.values():
            if isinstance(task.status, Queued) and not task.status.held:
                fair.add(queue_key(task), task.owner.uid, state.accounts.level(task.owner.uid))
        ours = {rank: (queue.tasks, queue.users) for rank, queue in state.fair_queue.by_rank.items()}
        if ours != {rank: (queue.tasks, queue.users) for rank, queue in fair.by_rank.items()}:
            broken.append("users' lines and levels are not those of the queued tasks")
    return broken
