"""Whose turn it is. One pass along the line: the first that cannot start is fenced in, a bounded number behind it is
looked at. `schedule`, `explain`, `waiting` and `try_now` are all the same pass, so what is shown is what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from carma.core.decision import Ask, Decision, Refusal, Verdict
from carma.core.events import TaskPlaced
from carma.core.model import AttemptKey, GpuId, Record, TaskId
from carma.core.outcome import describe
from carma.core.placement import closed_to_all, decide
from carma.core.reserve import Fence, free_at, keeper, reserve
from carma.core.snapshot import expected_runtime_s, views
from carma.core.state import State
from carma.core.status import Estimating, Finished, Queued, Recovering, Running, Starting
from carma.core.task import Task
from carma.core.units import show_s
from carma.core.view import GpuView, Holder

KEPT_VERDICTS = 16  # with each placement, so that `explain` can tell later; more would swell the log of a large server


class Waiting(Record, frozen=True):
    """Why a task is not running: a short code for a column, a sentence, and the start that is kept for it."""

    code: str
    sentence: str
    reserved_start_at: float | None = None


def ask_of(task: Task, state: State) -> Ask:
    """What the task needs: recovery's figure, else the estimate's bound, else the figure for the unknown."""
    plan = task.plan
    alone = task.spec.exclusive or (plan is not None and plan.rung == "alone")
    if plan is not None and plan.memory_mib is not None:
        memory, source = plan.memory_mib, "recovery"
    elif task.estimate is not None:
        memory, source = task.estimate.upper_mib, task.estimate.source
    else:
        memory, source = state.rules.memory.unknown_mib, "unknown"
    if source not in ("declared", "recovery"):
        # A guess above every card must not keep the task out for ever: it gets the largest card to itself.
        largest = max((gpu.memory_mib for gpu in state.gpus.values()), default=0)
        if memory > largest > 0:
            memory, alone = largest, True
    return Ask(task.id, task.spec.gpus, memory, source, alone)


def not_yet(task: Task, state: State, now: float) -> Waiting | None:
    """Why a queued task's turn cannot come, whatever the GPUs do."""
    spec = task.spec
    if isinstance(task.status, Queued) and task.status.held:
        return Waiting("Held", f"held; `carma release {task.id}` lets it start")
    if spec.begin_at is not None and spec.begin_at > now:
        return Waiting("BeginTime", f"begins in {show_s(spec.begin_at - now)}")
    for dependency in spec.after:
        other = state.tasks.get(dependency.task)
        if other is not None and not isinstance(other.status, Finished):
            return Waiting("Dependency", f"waits for task {dependency.task}")
    if spec.array is not None and spec.array.at_once is not None:
        running = state.in_array.get(spec.array.array, 0)
        if running >= spec.array.at_once:
            return Waiting("ArrayLimit", f"{running} of its array run; at most {spec.array.at_once} may")
    return None


class _Pass:
    """One walk along the line on a working copy of the GPUs."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.views = list(views(state, now))
        self.last_gpu = state.last_gpu
        self.fence: Fence | None = None
        self.behind = 0
        self.refused: dict[tuple[int, int, bool, float], Decision] = {}
        self.started: dict[TaskId, int] = {}  # arrays: how many this pass has started

    def consider(self, task: Task) -> Decision:
        """Decide for one task, and change the working copy as if it had been done."""
        ask = ask_of(task, self.state)
        fenced: Callable[[GpuView], Refusal | None] | None = None
        runtime_s = expected_runtime_s(task, self.state.rules)
        if self.fence is not None:
            self.behind += 1
            fenced = keeper(self.fence, ask, runtime_s, self.state.rules, self.state.policy.shares, self.now)
        shape = (ask.gpus, ask.memory_mib, ask.alone, runtime_s if self.fence is not None else -1.0)
        if shape in self.refused:  # GPUs only fill up during a pass: what was refused stays refused
            return replace(self.refused[shape], task=task.id)
        decision = decide(ask, self.views, self.state.rules, self.state.policy, self.last_gpu, self.now, fenced)
        if decision.placement is not None:
            self._apply(ask, decision, runtime_s)
        else:
            self.refused[shape] = decision
            if self.fence is None:
                overtaken = self.state.overtaken.get(task.id, 0)
                self.fence = reserve(ask, self.views, self.state.rules, self.state.policy.shares, overtaken, self.now)
        return decision

    def _apply(self, ask: Ask, decision: Decision, runtime_s: float) -> None:
        assert decision.placement is not None
        chosen = set(decision.placement.gpus)
        holder = Holder(
            key=AttemptKey(ask.task, 0),
            booking_mib=ask.memory_mib,
            alone=ask.alone,
            warming="was sent there just now",
            ends_at=self.now + runtime_s,
        )
        self.views = [view.joined_by(holder) if view.gpu.id in chosen else view for view in self.views]
        self.last_gpu = decision.placement.gpus[-1]

    def overtakes(self, decision: Decision) -> TaskId | None:
        """The fenced task, if this placement took a GPU that it could have used."""
        if self.fence is None or decision.placement is None:
            return None
        chosen = set(decision.placement.gpus)
        rules = self.state.rules
        for view in self.views:
            if (
                view.gpu.id in chosen
                and free_at(self.fence.ask, view, rules, self.state.policy.shares, self.now) is not None
            ):
                return self.fence.ask.task
        return None

    def array_is_full(self, task: Task) -> bool:
        """Counting those of its array that this walk has started."""
        array = task.spec.array
        if array is None or array.at_once is None:
            return False
        return self.state.in_array.get(array.array, 0) + self.started.get(array.array, 0) >= array.at_once

    @property
    def over(self) -> bool:
        """Nothing more can start: the line was looked at far enough, or every GPU is closed to everybody."""
        if self.behind >= self.state.rules.queue.backfill_depth and self.fence is not None:
            return True
        return self.fence is not None and all(self._shut(view) for view in self.views)

    def _shut(self, view: GpuView) -> bool:
        if view.fault is not None or view.drained is not None or view.room_mib is None:
            return True
        if not view.holders:
            return False
        rules = self.state.rules
        return (
            not self.state.policy.shares
            or any(holder.alone for holder in view.holders)
            or len(view.holders) >= rules.placement.tasks_per_gpu
            or closed_to_all(view, rules) is not None
        )


def _turns(state: State, now: float, walk: _Pass) -> Iterator[Task]:
    """Those whose turn it may be, in order, as long as the walk is worth going on with."""
    for _, _, task_id in state.line:
        task = state.tasks[task_id]
        if not_yet(task, state, now) is not None:
            continue
        if not walk.array_is_full(task):
            yield task
        if walk.over:
            return


def schedule(state: State, now: float) -> list[TaskPlaced]:
    """The placements that are due."""
    if not state.line or not state.gpus:
        return []
    walk = _Pass(state, now)
    placed: list[TaskPlaced] = []
    for task in _turns(state, now, walk):
        decision = walk.consider(task)
        if decision.placement is None:
            continue
        key = AttemptKey(task.id, task.key.attempt + 1)
        overtaken = walk.overtakes(decision)
        verdicts = decision.verdicts[:KEPT_VERDICTS]
        placed.append(TaskPlaced(now, key, decision.placement, decision.reason, overtaken, verdicts))
        if task.spec.array is not None:
            array = task.spec.array.array
            walk.started[array] = walk.started.get(array, 0) + 1
    return placed


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
        case Recovering(until=until):
            reason = task.plan.reason if task.plan is not None else "its last attempt is being looked at"
            return Waiting("Recovery", f"back in the queue in {show_s((until or now) - now)}: {reason}")
        case Queued():
            return not_yet(task, state, now)
        case _:
            return None


def _reasons_in_line(state: State, now: float, ids: set[TaskId]) -> dict[TaskId, Waiting]:
    walk = _Pass(state, now)
    found: dict[TaskId, Waiting] = {}
    head: TaskId | None = None
    for task in _turns(state, now, walk):
        decision = walk.consider(task)
        start_at = None
        if walk.fence is not None and walk.fence.ask.task == task.id:
            head, start_at = task.id, walk.fence.start_at
        if task.id in ids:
            found[task.id] = _waiting(decision, start_at, now)
    for place, (_, _, task_id) in enumerate(state.line):
        if task_id in ids and task_id not in found:
            front = f"; task {head} waits for a GPU first" if head is not None else ""
            before = "1 task is" if place == 1 else f"{place} tasks are"
            found[task_id] = Waiting("Priority", f"{before} before it in the queue{front}")
    return found


def _waiting(decision: Decision, start_at: float | None, now: float) -> Waiting:
    if decision.placement is not None:
        return Waiting("Starting", decision.reason)
    if start_at is None:
        return Waiting(decision.code, decision.reason)
    return Waiting(decision.code, f"{decision.reason}; should start in {show_s(start_at - now)}", start_at)


def explain(state: State, task_id: TaskId, now: float) -> Decision:
    """The decision for that task as it would be taken now, with all that stands before it; or why none is due."""
    task = state.tasks[task_id]
    match task.status:
        case Starting(placement=placement) | Running(placement=placement):
            return _as_placed(state, task, placement.gpus)
        case Finished(outcome=outcome):
            return Decision(task_id, now, state.policy.name, (), None, describe(outcome), "Finished")
        case _:
            pass
    walk = _Pass(state, now)
    for other in _turns(state, now, walk):
        decision = walk.consider(other)
        if other.id == task_id:
            return decision
    blocked = waiting(state, now, [task_id])[task_id]
    ask = ask_of(task, state)
    decision = decide(ask, walk.views, state.rules, state.policy, walk.last_gpu, now)
    return Decision(task_id, now, decision.policy, decision.verdicts, None, blocked.sentence, blocked.code)


def _as_placed(state: State, task: Task, gpus: tuple[GpuId, ...]) -> Decision:
    """What was decided then; a GPU of which nothing was kept says so."""
    attempt = task.attempts[-1]
    kept = {verdict.gpu: verdict for verdict in attempt.verdicts}
    ordered = sorted(state.gpus.values(), key=lambda gpu: gpu.index)
    verdicts = tuple(
        kept.get(gpu.id) or Verdict(gpu.id, Refusal("NotChosen", "another was chosen"), (), gpu.id in gpus)
        for gpu in ordered
    )
    return Decision(task.id, attempt.placed_at, state.policy.name, verdicts, attempt.placement, attempt.decision)


def try_now(state: State, task: Task, now: float) -> Decision:
    """What would become of a task that is not in the queue yet, behind all that are."""
    walk = _Pass(state, now)
    for other in _turns(state, now, walk):
        walk.consider(other)
    return walk.consider(task)
