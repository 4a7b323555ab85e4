"""Why tasks wait. `explain`, `waiting` and `try_now` run the same scheduling pass as `schedule` and read its reasons,
so what is shown is what happens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from carma.core.model.outcome import describe
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import Gpu, TaskId
from carma.core.preemption import asked_for
from carma.core.scheduling.decision import Decision, Refusal, Verdict
from carma.core.scheduling.placement import choose
from carma.core.scheduling.reasons import Choice, conclude, short_sentence
from carma.core.scheduling.scheduling_pass import (
    KEPT_VERDICTS,
    PLACED_AT_ONCE,
    Due,
    Pass,
    Waiting,
    ask_of,
    newcomer_turn,
    not_yet,
    schedule,
    turns,
    whole_line,
)
from carma.core.scheduling.urgency import ordered, out_of_turn
from carma.core.state import SERVER, State

__all__ = [
    "KEPT_VERDICTS",
    "PLACED_AT_ONCE",
    "Waiting",
    "ask_of",
    "explain",
    "in_order",
    "not_yet",
    "schedule",
    "try_now",
    "waiting",
]


def waiting(state: State, now: float, ids: Collection[TaskId] | None = None) -> dict[TaskId, Waiting]:
    """Why each of those tasks is not running (all that wait, if none are named)."""
    wanted = [state.tasks[task_id] for task_id in ids if task_id in state.tasks] if ids is not None else None
    if wanted is None:
        wanted = [task for task in state.tasks.values() if not isinstance(task.status, Finished | Starting | Running)]
    found: dict[TaskId, Waiting] = {}
    in_line: set[TaskId] = set()
    for task in wanted:
        plain = _plain_reason(task, state, now)
        if plain is not None:
            found[task.id] = plain
        elif isinstance(task.status, Queued):
            in_line.add(task.id)
    if in_line:
        found.update(_reasons_in_line(state, now, in_line))
    return found


def _plain_reason(task: Task, state: State, now: float) -> Waiting | None:
    match task.status:
        case Estimating():
            return Waiting("Estimating", "its memory is being estimated")
        case Ended():
            return Waiting("Recovery", "its attempt has just ended; whether it is retried is being decided")
        case Recovering(until=until):
            assert task.plan is not None
            return Waiting("Recovery", f"back in the queue in {show_s(until - now)}: {task.plan.reason}")
        case Queued():
            return not_yet(task, state, now)
        case _:
            return None


def _reasons_in_line(state: State, now: float, ids: set[TaskId]) -> dict[TaskId, Waiting]:
    walk = Pass(state, now)
    order = out_of_turn(state, now)
    found: dict[TaskId, Waiting] = {}
    head: TaskId | None = None
    for task in turns(state, now, walk):
        choice = walk.consider(task)
        start_at = None
        reservation = walk.reservation
        if reservation is not None and reservation.ask.task == task.id:
            head, start_at = task.id, reservation.start_at
        if task.id in ids:
            found[task.id] = _waiting(choice, start_at, now, _besides(state, task.id, now, order))
    for place, task_id in enumerate(in_order(state, now)):
        if task_id in ids and task_id not in found:
            stop = walk.stop_of(state.tasks[task_id])
            if stop is not None:
                found[task_id] = stop
                continue
            front = f"; task {head} waits for a GPU first" if head is not None else ""
            front += f"; {order[task_id]}" if task_id in order else ""
            found[task_id] = _drained(state) or Waiting("Priority", f"{_before(place)} before it in the queue{front}")
    return found


def _waiting(choice: Choice, start_at: float | None, now: float, besides: str) -> Waiting:
    code, sentence = short_sentence(choice)
    if choice.chosen:
        return Waiting("Starting", sentence)
    if besides:
        sentence = f"{sentence}; {besides}"
    if start_at is None:
        return Waiting(code, sentence)
    return Waiting(code, f"{sentence}; should start in {show_s(start_at - now)}", start_at)


def explain(state: State, task_id: TaskId, now: float) -> Decision:
    """The decision for that task as it would be taken now, with all that stands before it; or why none is due."""
    task = state.tasks[task_id]
    match task.status:
        case Starting() | Running():
            return _as_placed(state, task)
        case Finished(at=at, outcome=outcome):
            placed = _as_placed(state, task) if task.attempts else _never_placed(state, task)
            return replace(placed, at=at, placement=None, reason=describe(outcome), code="Finished")
        case _:
            pass
    walk = Pass(state, now, explain=task_id)
    for other in turns(state, now, walk):
        choice = walk.consider(other)
        if other.id == task_id:
            return _told(
                conclude(choice, state.policy.name, now), _besides(state, task_id, now, out_of_turn(state, now))
            )
    blocked = waiting(state, now, [task_id])[task_id]
    return _blocked(walk, task, blocked)


def _told(decision: Decision, besides: str) -> Decision:
    if not besides or decision.placement is not None:
        return decision
    return replace(decision, reason=f"{decision.reason}; {besides}")


def _besides(state: State, task_id: TaskId, now: float, order: Mapping[TaskId, str]) -> str:
    """What does not stand in the decision: who goes before whom by the policy, whom CARMA asked to make room."""
    return "; ".join(phrase for phrase in (order.get(task_id), asked_for(state, task_id, now)) if phrase)


def _blocked(walk: Pass, task: Task, blocked: Waiting) -> Decision:
    """What the GPUs say to a task whose turn it is not; none is chosen, whatever they say."""
    state = walk.state
    ask = ask_of(task, state)
    idle_first = state.rules.placement.idle_first
    choice = choose(ask, walk.candidates, state.policy, walk.last_gpu, idle_first=idle_first, rank_all=True)
    seen = conclude(choice, state.policy.name, walk.now)
    verdicts = tuple(replace(verdict, chosen=False) for verdict in seen.verdicts)
    return replace(seen, verdicts=verdicts, placement=None, reason=blocked.sentence, code=blocked.code)


def _in_order(state: State) -> list[Gpu]:
    return sorted(state.gpus.values(), key=lambda gpu: gpu.index)


def _as_placed(state: State, task: Task) -> Decision:
    """The newest attempt's decision as it was taken; the log keeps a bounded number of GPUs of it."""
    attempt = task.attempts[-1]
    kept = {verdict.gpu: verdict for verdict in attempt.verdicts}
    other = Refusal("NotChosen", "another GPU was chosen")
    verdicts = tuple(kept.get(gpu.id) or Verdict(gpu.id, other) for gpu in _in_order(state))
    return Decision(task.id, attempt.placed_at, state.policy.name, verdicts, attempt.placement, attempt.decision)


def _never_placed(state: State, task: Task) -> Decision:
    over = Refusal("Finished", "the task ended before a GPU was chosen")
    verdicts = tuple(Verdict(gpu.id, over) for gpu in _in_order(state))
    return Decision(task.id, task.submitted_at, state.policy.name, verdicts, None, "")


def try_now(state: State, task: Task, now: float) -> Decision:
    """What would become of a task that is not in the queue yet, in its turn: behind all of its priority."""
    walk = Pass(state, now, explain=task.id)
    for other in turns(state, now, walk, task):
        choice = walk.consider(other)
        if other is task:
            return conclude(choice, state.policy.name, now)
    blocked = not_yet(task, state, now)
    before = _place_of(state, task, now)
    turn_later = _drained(state) or Waiting("Priority", f"{_before(before)} before it in the queue")
    return _blocked(walk, task, blocked or turn_later)


def in_order(state: State, now: float) -> Iterable[TaskId]:
    """All of the line, in the order of their turns."""
    if state.lanes is None:
        return [task_id for _, _, task_id in ordered(state, state.line, now).line]
    return (task.id for task, _ in whole_line(state, now, Due(state)))


def _place_of(state: State, newcomer: Task, now: float) -> int:
    """How many are before one that is not in the queue yet."""
    if state.lanes is None:
        return bisect_left(state.line, newcomer_turn(state, newcomer))
    line = enumerate(whole_line(state, now, Due(state), newcomer))
    return next(place for place, (task, _) in line if task is newcomer)


def _drained(state: State) -> Waiting | None:
    """For those whose turn has not come: that nothing starts at all matters more than who is before them."""
    reason = state.drained.get(SERVER)
    if reason is not None:
        return Waiting("Drained", "the server is drained" + (f": {reason}" if reason else ""))
    return Waiting("Drained", "every GPU is drained") if state.gpus.keys() <= state.drained.keys() else None


def _before(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"
