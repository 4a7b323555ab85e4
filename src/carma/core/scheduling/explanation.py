"""Why tasks wait. `explain`, `waiting` and `try_now` run the same scheduling pass as `schedule` and read its reasons,
so what is shown is what happens."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from carma.core.model.decision import Decision, Refusal, Verdict
from carma.core.model.outcome import describe
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import TaskId
from carma.core.preemption import asked_for
from carma.core.scheduling.eligibility import Waiting, ask_of, why_not_eligible
from carma.core.scheduling.placement import choose
from carma.core.scheduling.queue_order import overtaking, queued_ids, tasks_before
from carma.core.scheduling.reasons import Choice, conclude, short_sentence
from carma.core.scheduling.reservation import Reservation
from carma.core.scheduling.scheduling_pass import SchedulingPass
from carma.core.state import SERVER, State


def waiting(state: State, now: float, ids: Collection[TaskId] | None = None) -> dict[TaskId, Waiting]:
    """Why each of these tasks is not running; without `ids`, of all waiting tasks."""
    if ids is None:
        tasks = [task for task in state.tasks.values() if not isinstance(task.status, Finished | Starting | Running)]
    else:
        tasks = [state.tasks[task_id] for task_id in ids if task_id in state.tasks]
    found: dict[TaskId, Waiting] = {}
    eligible: set[TaskId] = set()
    for task in tasks:
        reason = _reason_without_gpus(task, state, now)
        if reason is not None:
            found[task.id] = reason
        elif isinstance(task.status, Queued):
            eligible.add(task.id)
    return found | _reasons_in_queue(state, now, eligible) if eligible else found


def _reason_without_gpus(task: Task, state: State, now: float) -> Waiting | None:
    match task.status:
        case Estimating():
            return Waiting("Estimating", "its memory is being estimated; until then it can start only on an idle GPU")
        case Ended():
            return Waiting("Recovery", "its attempt has just ended; whether it is retried is being decided")
        case Recovering(until=until):
            assert task.plan is not None
            return Waiting("Recovery", f"back in the queue in {show_s(until - now)}: {task.plan.reason}")
        case Queued():
            return why_not_eligible(task, state, now)
        case _:
            return None


def _reasons_in_queue(state: State, now: float, ids: set[TaskId]) -> dict[TaskId, Waiting]:
    scheduling = SchedulingPass(state, now)
    order = overtaking(state, now)
    found: dict[TaskId, Waiting] = {}
    drained = _drained(state)
    first: TaskId | None = None  # that cannot start
    for task in scheduling.tasks():
        choice = scheduling.consider(task)
        reservation = scheduling.reservation_of(task.id)
        if reservation is not None:
            first = task.id
        if task.id in ids:
            found[task.id] = drained or _waiting(choice, reservation, now, _remarks(state, task.id, now, order))
    for place, task_id in enumerate(queued_ids(state, now)):
        if task_id in ids and task_id not in found:
            in_front = f"; task {first} waits for a GPU first" if first is not None else ""
            in_front += f"; {order[task_id]}" if task_id in order else ""
            stop = scheduling.stop_of(state.tasks[task_id]) or drained
            found[task_id] = stop or Waiting("Priority", f"{_are_before(place)} before it in the queue{in_front}")
    return found


def _waiting(choice: Choice, reservation: Reservation | None, now: float, remarks: str) -> Waiting:
    code, sentence = short_sentence(choice)
    if choice.chosen:
        return Waiting("Starting", sentence)
    sentence = f"{sentence}; {remarks}" if remarks else sentence
    if reservation is None or reservation.start_at is None:
        return Waiting(code, sentence)
    known_at = reservation.start_at if reservation.doubtful is None else None
    return Waiting(code, f"{sentence}; {reservation.start_phrase(now)}", known_at)


def _remarks(state: State, task_id: TaskId, now: float, order: Mapping[TaskId, str]) -> str:
    """What a decision does not contain: a changed order, and the tasks that CARMA asked to make room."""
    return "; ".join(phrase for phrase in (order.get(task_id), asked_for(state, task_id, now)) if phrase)


def explain(state: State, task_id: TaskId, now: float) -> Decision:
    """The decision for that task as it would be taken now, with all that is before it; or why none is due."""
    task = state.tasks[task_id]
    match task.status:
        case Starting() | Running():
            return _as_placed(state, task)
        case Finished(at=at, outcome=outcome):
            return replace(_as_placed(state, task), at=at, placement=None, reason=describe(outcome), code="Finished")
        case _:
            pass
    scheduling = SchedulingPass(state, now, explain=task_id)
    for other in scheduling.tasks():
        choice = scheduling.consider(other)
        if other.id == task_id:
            decision = conclude(choice, state.policy.name, now)
            if decision.placement is not None:
                return decision
            if (drained := _drained(state)) is not None:
                return replace(decision, reason=drained.sentence, code=drained.code)
            remarks = _remarks(state, task_id, now, overtaking(state, now))
            reservation = scheduling.reservation_of(task_id)
            start = "" if reservation is None or reservation.doubtful is None else reservation.start_phrase(now)
            return replace(decision, reason="; ".join(part for part in (decision.reason, remarks, start) if part))
    return _not_considered(scheduling, task, waiting(state, now, [task_id])[task_id])


def _not_considered(scheduling: SchedulingPass, task: Task, reason: Waiting) -> Decision:
    """The verdicts on a task that the pass did not consider; no GPU is chosen."""
    state = scheduling.state
    idle_first = state.rules.placement.idle_first
    ask, last_gpu = ask_of(task, state), scheduling.last_gpu
    choice = choose(ask, scheduling.candidates, state.policy, last_gpu, idle_first=idle_first, rank_all=True)
    decision = conclude(choice, state.policy.name, scheduling.now)
    verdicts = tuple(replace(verdict, chosen=False) for verdict in decision.verdicts)
    return replace(decision, verdicts=verdicts, placement=None, reason=reason.sentence, code=reason.code)


def _as_placed(state: State, task: Task) -> Decision:
    """The newest attempt's decision as it was taken; the log keeps a bounded number of its GPUs."""
    gpus = sorted(state.gpus.values(), key=lambda gpu: gpu.index)
    if not task.attempts:
        over = Refusal("Finished", "the task ended before a GPU was chosen")
        verdicts = tuple(Verdict(gpu.id, over) for gpu in gpus)
        return Decision(task.id, task.submitted_at, state.policy.name, verdicts, None, "")
    attempt = task.attempts[-1]
    logged = {verdict.gpu: verdict for verdict in attempt.verdicts}
    other = Refusal("NotChosen", "another GPU was chosen")
    verdicts = tuple(logged.get(gpu.id) or Verdict(gpu.id, other) for gpu in gpus)
    return Decision(task.id, attempt.placed_at, state.policy.name, verdicts, attempt.placement, attempt.decision)


def try_now(state: State, task: Task, now: float) -> Decision:
    """What would become of a task that is not in the queue yet: behind all tasks of its priority."""
    scheduling = SchedulingPass(state, now, explain=task.id)
    for other in scheduling.tasks(task):
        choice = scheduling.consider(other)
        if other is task:
            return conclude(choice, state.policy.name, now)
    before = f"{_are_before(tasks_before(state, task, now))} before it in the queue"
    reason = why_not_eligible(task, state, now) or _drained(state) or Waiting("Priority", before)
    return _not_considered(scheduling, task, reason)


def _drained(state: State) -> Waiting | None:
    """The reason if all GPUs are drained. It precedes the refusals of GPUs and the tasks before this one."""
    reason = state.drained.get(SERVER)
    if reason is not None:
        return Waiting("Drained", "the server is drained" + (f": {reason}" if reason else ""))
    return Waiting("Drained", "every GPU is drained") if _all_drained(state) else None


def _all_drained(state: State) -> bool:
    return bool(state.gpus) and state.gpus.keys() <= state.drained.keys()


def _are_before(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"
