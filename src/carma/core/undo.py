"""Undo of harmful sharing. A GPU on which a task is slowed down beyond the limit (telemetry/slowed.py)

1. takes no more tasks (scheduling/verdicts.py);
2. loses its newest task that can save a checkpoint, if CARMA may preempt tasks;
3. otherwise has the newest task that may be paused stand still, for a bounded time.

Optimizer steps are figures of the task's user, so a pause is bounded and tests the claim: if the slowed task is not
clearly faster meanwhile, the pause ends and its steps cause no other one. docs/pausing.md has the whole argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from carma.core.model.events import PreemptionRequested, TaskPaused, TaskUnpaused
from carma.core.model.status import Paused, Running
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.pausing import CARMA, HOUR_S, gpu_processes, unpausable
from carma.core.preemption import may_be_moved, request
from carma.core.scheduling.forecast import CLEARLY_LESS
from carma.core.state import EARLY_S, State
from carma.core.telemetry.slowed import Slowed, changes_at, limit, slowed_on
from carma.core.telemetry.step_rates import slowdown

LEAST_PAUSE_S = 15.0  # a shorter pause tests no claim
TEST_S = 30.0  # after which a claim that is not confirmed is refuted; the length of a window


# -- the end of pauses ----------------------------------------------------------------------------------------------


def ends(state: State, now: float) -> Iterator[TaskUnpaused]:
    """Pauses by CARMA that are over."""
    for task, paused in _own_pauses(state):
        over = _over(state, task, paused, now)
        if over is not None:
            yield TaskUnpaused(now, task.id, CARMA, *over)


def _own_pauses(state: State) -> Iterator[tuple[Task, Paused]]:
    for key, track in state.tracks.items():
        task = state.tasks[key.task]
        if track.pause_began_at is not None and task.paused is not None and task.paused.slowed is not None:
            yield task, task.paused


def _over(state: State, task: Task, paused: Paused, now: float) -> tuple[str, bool | None] | None:
    """Why the pause is over, and whether the slowed task was faster meanwhile; None while the pause goes on."""
    assert paused.slowed is not None
    assert paused.until is not None
    slowed, gpus = state.tasks.get(paused.slowed), task.attempts[-1].placement.gpus
    beside = slowed is not None and any(slowed.key in state.on_gpu.get(gpu, ()) for gpu in gpus)
    if slowed is None or not beside or slowed.paused is not None:
        return f"task {paused.slowed} does not need it any more", None
    if any(state.live_of(gpu).left_at >= paused.at for gpu in gpus):
        return "another task has left the GPU", None
    faster = _faster(state, slowed, paused)
    if now >= paused.until - EARLY_S:
        return f"it stood still for {show_s(now - paused.at)}, and not again for task {slowed.id}", faster is True
    if faster is False and now >= paused.at + TEST_S - EARLY_S:
        return f"task {slowed.id} was not faster meanwhile", False
    return None


def _faster(state: State, slowed: Task, paused: Paused) -> bool | None:
    found = slowdown(state, slowed, slowed.attempts[-1])
    if found is None or found.inferred or paused.slowdown is None:
        return None
    return found.value <= CLEARLY_LESS * paused.slowdown


# -- what is undone -------------------------------------------------------------------------------------------------


def starts(state: State, now: float) -> list[TaskPaused | PreemptionRequested]:
    """The most useful change, one at a time: afterwards the slowdown is measured again."""
    if not state.rules.undo.enabled:
        return []
    for gpu in state.gpus:
        found = slowed_on(state, gpu, now)
        tasks = [state.tasks[key.task] for key in state.on_gpu.get(gpu, ())]
        if found is None or any(_is_leaving(task) for task in tasks):
            continue
        tasks.sort(key=lambda task: (task.attempts[-1].placed_at, task.id), reverse=True)
        event = _move(state, found, tasks, now) or _pause(state, found, tasks, now)
        if event is not None:
            return [event]
    return []


def _is_leaving(task: Task) -> bool:
    """Whether the group is about to change, or has just been changed."""
    status = task.status
    if not isinstance(status, Running):
        return True
    by_carma = status.paused is not None and status.paused.slowed is not None
    return by_carma or status.ending is not None or status.preempting is not None


def _sentence(state: State, found: Slowed) -> str:
    about = "about " if found.inferred else ""
    return f"task {found.task} takes {about}{found.value:.2f} times as long as alone (limit {limit(state):g})"


def _move(state: State, found: Slowed, newest_first: list[Task], now: float) -> PreemptionRequested | None:
    if not state.rules.preemption.enabled:
        return None
    task = next((one for one in newest_first if may_be_moved(state, one, now)), None)
    return None if task is None else request(task, now, CARMA, f"on its GPU {_sentence(state, found)}")


def _pause(state: State, found: Slowed, newest_first: list[Task], now: float) -> TaskPaused | None:
    """Only a task that came after the slowed one, and only by a measured slowdown."""
    slowed = state.tasks[found.task]
    for task in newest_first if not found.inferred else ():
        if task is slowed:
            return None
        most_s = min(_most_s(state, task, now), _left_s(state, slowed, now))
        if most_s >= LEAST_PAUSE_S and _may_be_paused(state, task, slowed):
            reason = f"beside it {_sentence(state, found)}"
            return TaskPaused(now, task.id, CARMA, reason, now + most_s, slowed.id, found.value)
    return None


def _may_be_paused(state: State, task: Task, slowed: Task) -> bool:
    if not task.spec.pause or task.paused is not None or slowed.id in task.attempts[-1].paused_for:
        return False
    return unpausable(state, task) is None and gpu_processes(state, task) == 1


def _most_s(state: State, task: Task, now: float) -> float:
    """For how long CARMA may pause the task now: by the pauses, too, it must not be slower than the cap allows."""
    track, attempt = state.tracks[task.key], task.attempts[-1]
    ran_s, own = track.ran_s(now), slowdown(state, task, attempt)
    done_s = min(track.done_by(now), ran_s / own.value) if own is not None else track.done_by(now)
    own_s = state.rules.placement.slowdown_cap * done_s - ran_s - attempt.paused_by_carma_s
    return min(state.rules.undo.pause_limit_s, own_s)


def _left_s(state: State, slowed: Task, now: float) -> float:
    """For how long neighbours may still be paused for the slowed task within this hour."""
    relief = slowed.relief
    spent_s = relief.seconds if relief is not None and now < relief.since + HOUR_S else 0.0
    return state.rules.undo.pause_limit_s - spent_s


def next_at(state: State, now: float) -> float:
    """When something may be due next if nothing happens; for a simulated clock."""
    times = [at for _, paused in _own_pauses(state) for at in (paused.at + TEST_S, paused.until or inf)]
    times += [changes_at(state, gpu, now) for gpu in state.gpus]
    return min((at for at in times if at - EARLY_S > now), default=inf)
