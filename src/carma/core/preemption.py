"""Decides which running tasks are asked to save a checkpoint and leave for the first task in the queue that cannot
start, and which may be asked at all.

Only tasks that declare a checkpoint signal are asked, and only once for the same waiting task. A task that does not
leave goes on (checkpoint_request.py). The smallest sufficient set of tasks is chosen; among equal sets the one of
lowest priority; then the one with the shortest run time, because each task repeats its start-up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from carma.core.checkpoint_request import is_over
from carma.core.model.decision import Ask
from carma.core.model.events import PreemptionMissed, PreemptionRequested
from carma.core.model.outcome import Preempted
from carma.core.model.status import Queued, Running
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import AttemptKey, Record, TaskId
from carma.core.pausing import CARMA
from carma.core.scheduling.reservation import fits
from carma.core.scheduling.scheduling_pass import SchedulingPass
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.scheduling.verdicts import Candidate, takes_tasks
from carma.core.state import State

COMPARED = 6  # maximum number of tasks on a GPU whose combinations are compared


class Leaving(Record, frozen=True, order=True):
    """A set of tasks that would leave one GPU. The smallest is the best."""

    count: int
    priority: int  # the highest among them
    run_s: float  # sum of their run times
    place: int  # the GPU's index
    tasks: tuple[TaskId, ...]


def stayed(state: State, now: float) -> list[PreemptionMissed]:
    """Tasks that still run after the grace period of their request."""
    due: list[PreemptionMissed] = []
    for task_id in sorted(state.preempting):
        status = state.tasks[task_id].status
        assert isinstance(status, Running)
        assert status.preempting is not None
        if status.ending is None and is_over(status.preempting, now):
            due.append(PreemptionMissed(now, task_id))
    return due


def asks(state: State, now: float, cache: VerdictCache | None = None) -> list[PreemptionRequested]:
    """Requests by CARMA itself."""
    if not state.rules.preemption.enabled:
        return []
    return room_for_the_first(state, now, cache)


def may_be_asked(state: State, task: Task, now: float) -> bool:
    """Whether CARMA may ask this task. Users may ask earlier and repeatedly."""
    status, rules = task.status, state.rules.preemption
    if task.spec.checkpoint is None or not isinstance(status, Running):
        return False
    if status.ending is not None or status.preempting is not None:
        return False
    if status.stayed_at is not None and now < status.stayed_at + rules.again_s:
        return False
    return now >= status.since + rules.least_run_s


def request(task: Task, now: float, by: str, reason: str, room_for: TaskId | None = None) -> PreemptionRequested:
    saves = task.spec.checkpoint
    assert saves is not None
    return PreemptionRequested(now, task.id, by, saves.signal, saves.grace_s, reason, room_for=room_for)


def may_be_moved(state: State, task: Task, now: float) -> bool:
    """Whether CARMA may ask the task to go elsewhere (undo.py): once. It could return to the same neighbours and be
    moved for ever."""
    left = (isinstance(one.outcome, Preempted) and one.outcome.by == CARMA for one in task.attempts)
    return may_be_asked(state, task, now) and not any(left)


# -- room for the first task in the queue ----------------------------------------------------------------------------
def room_for_the_first(state: State, now: float, cache: VerdictCache | None = None) -> list[PreemptionRequested]:
    """Tasks whose end lets the first waiting task start, if it has waited long enough and cannot start soon."""
    if not state.queue or not state.gpus:
        return []
    able = {task_id: one for task_id in state.active if may_be_asked(state, one := state.tasks[task_id], now)}
    if not able:
        return []
    scheduling = SchedulingPass(state, now, cache)
    task = next(scheduling.tasks(), None)
    if task is None or _asked_for(state, task.id) or not _waited(state, task, now):
        return []
    choice = scheduling.consider(task)
    start_at = scheduling.reservation.start_at if scheduling.reservation is not None else None
    if choice.chosen or (start_at is not None and start_at <= now + state.rules.preemption.after_s):
        return []
    lower = {task_id: one for task_id, one in able.items() if one.spec.priority < task.spec.priority}
    reason = f"task {task.id}, of priority {task.spec.priority}, waits for its GPUs"
    chosen = leaving(state, choice.ask, scheduling.candidates, lower, now)
    return [request(lower[task_id], now, CARMA, reason, task.id) for task_id in chosen]


def _waited(state: State, task: Task, now: float) -> bool:
    assert isinstance(task.status, Queued)
    since = max(task.status.since, task.spec.begin_at or 0.0)
    return now >= since + state.rules.preemption.after_s


def _asked_for(state: State, task_id: TaskId) -> list[Task]:
    """Tasks that were asked to leave for this task and still run."""
    asked = (state.tasks[one] for one in sorted(state.preempting))
    return [
        one
        for one in asked
        if isinstance(one.status, Running)
        and one.status.preempting is not None
        and one.status.preempting.room_for == task_id
    ]


def asked_for(state: State, task_id: TaskId, now: float) -> str:
    """A phrase for the reason why this task waits; "" if no task was asked to make room for it."""
    asked = _asked_for(state, task_id)
    if not asked:
        return ""
    status = asked[0].status
    assert isinstance(status, Running)
    assert status.preempting is not None
    names = ", ".join(str(one.id) for one in asked)
    tasks = f"task {names} was" if len(asked) == 1 else f"tasks {names} were"
    return f"{tasks} asked {show_s(now - status.preempting.at)} ago to save and make room"


def leaving(
    state: State, ask: Ask, candidates: Collection[Candidate], able: Mapping[TaskId, Task], now: float
) -> tuple[TaskId, ...]:
    """The tasks to ask; none if that does not make enough room, or if none need leave."""
    found = sorted(option for one in candidates if (option := _cheapest(state, ask, one, able, now)) is not None)
    if len(found) < ask.gpus:
        return ()
    return tuple(sorted({task_id for option in found[: ask.gpus] for task_id in option.tasks}))


def _cheapest(state: State, ask: Ask, candidate: Candidate, able: Mapping[TaskId, Task], now: float) -> Leaving | None:
    """The best set of tasks whose end lets the GPU accept the request; empty if none need leave."""
    here = [holder.key for holder in candidate.view.holders if holder.key.task in able]
    here.sort(key=lambda key: _option(candidate, (key,), able, now))
    for count in range(len(here[:COMPARED]) + 1):
        sets = (keys for keys in combinations(here[:COMPARED], count) if _lets_in(state, ask, candidate, keys))
        options = [_option(candidate, keys, able, now) for keys in sets]
        if options:
            return min(options)
    return None


def _option(candidate: Candidate, keys: Collection[AttemptKey], able: Mapping[TaskId, Task], now: float) -> Leaving:
    tasks = [able[key.task] for key in keys]
    return Leaving(
        count=len(tasks),
        priority=max((task.spec.priority for task in tasks), default=0),
        run_s=sum(now - task.status.since for task in tasks if isinstance(task.status, Running)),
        place=candidate.view.gpu.index,
        tasks=tuple(task.id for task in tasks),
    )


def _lets_in(state: State, ask: Ask, candidate: Candidate, keys: Collection[AttemptKey]) -> bool:
    """Whether the GPU accepts the request without these attempts. A GPU that is too busy must be left by all of them,
    because the activity of the others is not known before."""
    view, rules, policy = candidate.view, state.rules, state.policy
    if view.fault is not None or view.drained is not None or not takes_tasks(view.gpu, rules):
        return False
    staying, room_mib = view.without(keys)
    if not keys and not _passes(candidate, ask):
        return False
    too_busy = candidate.busy is not None and candidate.busy.code == "Utilisation"
    if too_busy and (staying or view.foreign or view.foreign_mib):
        return False
    return fits(ask, staying, room_mib, rules, policy)


def _passes(candidate: Candidate, ask: Ask) -> bool:
    """Whether the GPU accepts the request, or will within seconds (an attempt that settles, a sample that is due)."""
    refusal = candidate.refuse(ask)
    if refusal is None or refusal.code == "WarmUp":
        return True
    return refusal.code == "Metrics" and candidate.view.blind is not None
