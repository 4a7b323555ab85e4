"""One walk along the line on a working copy of the GPUs: the first that cannot start is fenced in, and a bounded number
behind it is looked at. Whoever decides, and whoever only wants to know, walks the same way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from math import inf

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import AttemptKey, Demand, Gpu, GpuId, Record, TaskId
from carma.core.scheduling.decision import Ask, Refusal
from carma.core.scheduling.fair_order import InTurn
from carma.core.scheduling.fairness import Held, wanted_by
from carma.core.scheduling.feasibility import by_size, never_fits
from carma.core.scheduling.gpu_view import MOST_BESIDE, Beside, GpuView, Holder, also_on
from carma.core.scheduling.placement import RECOVERY, UNKNOWN, Choice, Fenced, choose
from carma.core.scheduling.policy import Policy, as_of
from carma.core.scheduling.quota import Tally, limits_of, reached
from carma.core.scheduling.reservation import Fence, free_at, in_the_way, reserve, spare_mib
from carma.core.scheduling.snapshot import expected_runtime_s, not_begun, views
from carma.core.scheduling.urgency import ordered
from carma.core.scheduling.verdicts import door_of
from carma.core.state import State
from carma.core.telemetry.pace import belief

DRIVER_MIB = 512


class Waiting(Record, frozen=True):
    """Why a task is not running: a short code for a column, a sentence, and the start that is kept for it."""

    code: str
    sentence: str
    reserved_start_at: float | None = None


def ask_of(task: Task, state: State, sizes: Sequence[Gpu] | None = None) -> Ask:
    """What the task needs: recovery's figure, else the estimate's bound, else the figure for the unknown.

    `sizes` is `by_size(state)`, for those who ask often.
    """
    plan = task.plan
    alone = task.spec.exclusive or (plan is not None and plan.rung == "alone")
    if plan is not None and plan.memory_mib is not None:
        memory, source = plan.memory_mib, RECOVERY
    elif task.estimate is not None:
        memory, source = task.estimate.upper_mib, task.estimate.source
    else:
        memory, source = max(state.rules.memory.unknown_mib, _more_than_mib(task, state)), UNKNOWN
    if source != "declared":
        # A guess above every card must not keep the task out for ever: it gets the largest card to itself. Not all of
        # it is asked for, because a driver keeps some of a card in use even when nobody is on it.
        gpus = by_size(state) if sizes is None else sizes
        largest = gpus[min(task.spec.gpus, len(gpus)) - 1].memory_mib if gpus else 0
        if memory > largest - DRIVER_MIB and largest > 0:
            memory, alone = int(0.9 * largest), True
    return Ask(task.id, task.spec.gpus, memory, source, alone, belief(task, None), _alone_s(task))


def _alone_s(task: Task) -> float | None:
    return task.estimate.runtime_s if task.estimate is not None else None


def _more_than_mib(task: Task, state: State) -> int:
    """Nobody knows what it takes, but somebody may know what was not enough."""
    known = [refusal.more_than_mib for refusal in task.no_estimate if refusal.more_than_mib is not None]
    return max(known) + state.rules.recovery.margin_mib if known else 0


def not_yet(task: Task, state: State, now: float, sizes: tuple[Gpu, ...] | None = None) -> Waiting | None:
    """Why a queued task's turn cannot come, whatever the GPUs say. `sizes` as for `ask_of`."""
    early = not_due(task, state, now, sizes)
    if early is not None or not state.accounts.limited:
        return early
    held, limits = state.accounts.held(task.owner.uid), limits_of(state.rules.quota, task.owner.name)
    found = Due(state)
    stop = reached(limits, task.owner.name, held, found.wanted(task), found.total_mib)
    return None if stop is None else Waiting("Quota", stop.sentence)


def not_due(task: Task, state: State, now: float, sizes: tuple[Gpu, ...] | None = None) -> Waiting | None:
    """The same, whatever its user's other tasks do."""
    spec = task.spec
    if isinstance(task.status, Queued) and task.status.held:
        return Waiting("Held", f"held; `carma release {task.id}` lets it start")
    if state.gpus and (misfit := never_fits(state, spec, sizes)) is not None:
        return Waiting("NeverFits", misfit)  # it fitted when it was submitted; the GPUs are no longer there
    if spec.begin_at is not None and spec.begin_at > now:
        return Waiting("BeginTime", f"begins in {show_s(spec.begin_at - now)}")
    for dependency in spec.after:
        other = state.tasks.get(dependency.task)
        if other is not None and not isinstance(other.status, Finished):
            return Waiting("Dependency", f"waits for task {dependency.task}")
    if spec.array is not None and spec.array.at_once is not None:
        running = state.in_array.get(spec.array.array, 0)
        if running >= spec.array.at_once:
            run = "runs" if running == 1 else "run"
            return Waiting("ArrayLimit", f"{running} of its array {run}; at most {spec.array.at_once} may")
    return None


class Due:
    """Whose turn may come at all, on one way along the line: arrays and users have limits."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.sizes = by_size(state)
        self.largest_mib = self.sizes[0].memory_mib if self.sizes else 0
        self.total_mib = sum(gpu.memory_mib for gpu in self.sizes)
        self.tally = Tally(state.rules.quota, state.accounts, self.total_mib)
        self.stopped: dict[TaskId, str] = {}  # by their users' quotas, and why
        self.started: dict[TaskId, int] = {}  # arrays: how many this pass has started
        self.overtaken: TaskId | None = None  # by the one whose turn it is now, before its time (urgent.py)

    def wanted(self, task: Task) -> Held:
        return wanted_by(ask_of(task, self.state, self.sizes), self.largest_mib)

    def cost(self, task: Task) -> float:
        """What it would add to its user's level."""
        return self.state.accounts.ahead(task.owner.name, self.wanted(task).cards)

    def may_come(self, task: Task, now: float) -> bool:
        if not self.tally.has_stopped(task.owner) and (
            not_due(task, self.state, now, self.sizes) is not None or self.array_is_full(task)
        ):
            return False
        if not self.state.accounts.limited:
            return True
        why = self.tally.stops(task.id, task.owner, lambda: self.wanted(task))
        if why is not None:
            self.stopped[task.id] = why
        return why is None

    def array_is_full(self, task: Task) -> bool:
        """Counting those of its array that this walk has started."""
        array = task.spec.array
        if array is None or array.at_once is None:
            return False
        return self.state.in_array.get(array.array, 0) + self.started.get(array.array, 0) >= array.at_once


class Pass(Due):
    """One walk along the line on a working copy of the GPUs."""

    def __init__(self, state: State, now: float, *, explain: TaskId | None = None) -> None:
        super().__init__(state)
        self.now = now
        self.explain = explain  # the task whose decision somebody wants to read in full
        self.doors = [door_of(view, state.rules, state.policy) for view in views(state, now)]
        self.last_gpu = state.last_gpu
        self.fence: Fence | None = None
        self.reserved: Refusal | None = None  # what the fence says to those behind it
        self.spare_mib: dict[GpuId, int] = {}  # on its GPUs, for tasks that outlast the reserved start
        self.behind = 0
        self.refused: dict[tuple[int, int, bool, float, Demand | None], Choice] = {}

    def consider(self, task: Task) -> Choice:
        """Decide for one task, and change the working copy as if it had been done."""
        ask = replace(ask_of(task, self.state, self.sizes), at=as_of(self.now))
        runtime_s = expected_runtime_s(task, self.state.rules)
        fenced = None
        if self.fence is not None:
            self.behind += 1
            fenced = self._keeper(ask, runtime_s)
        shape = (ask.gpus, ask.memory_mib, ask.alone, runtime_s if self.fence is not None else -1.0, ask.demand)
        known = self.refused.get(shape)  # GPUs only fill up during a pass: what was refused stays refused
        if known is not None and task.id != self.explain:
            return replace(known, ask=ask)
        choice = choose(
            ask,
            self.doors,
            self.state.policy,
            self.last_gpu,
            idle_first=self.state.rules.placement.idle_first,
            fenced=fenced,
            rank_all=task.id == self.explain,
        )
        if choice.chosen:
            self._apply(choice, runtime_s)
            self.tally.gave(task.owner, wanted_by(ask, self.largest_mib))
        else:
            self.refused[shape] = choice
            if self.fence is None:
                self._set_fence(choice)
        return choice

    def _set_fence(self, choice: Choice) -> None:
        """For the first that cannot start. A GPU that the policy itself refuses is not kept for it."""
        rules, policy, ask = self.state.rules, self.state.policy, choice.ask
        refused = {gpu for gpu, refusal in choice.refusals.items() if refusal.code == "Policy"}
        found = [door for door in self.doors if door.view.gpu.id not in refused]
        self.fence = reserve(ask, found, rules, policy, self.state.overtaken.get(ask.task, 0), self.now)
        self.reserved = self.fence.refusal(self.now)
        for door in found:
            self._look_at_spare(door.view)

    def _look_at_spare(self, view: GpuView) -> None:
        if self.fence is not None and view.gpu.id in self.fence.gpus:
            rules, policy = self.state.rules, self.state.policy
            self.spare_mib[view.gpu.id] = spare_mib(self.fence, view, rules, policy, self.now)

    def _keeper(self, ask: Ask, runtime_s: float) -> Fenced | None:
        """The extra filter for a task behind the fence."""
        fence, spare = self.fence, self.spare_mib
        if fence is None or fence.start_at is None:
            return None
        if fence.degree == 1 and self.now + runtime_s <= fence.start_at:
            return None  # it should be gone by then
        wanted_mib = inf if ask.alone else ask.memory_mib

        holder = newcomer(ask, runtime_s, self.state.rules, self.now)

        def check(view: GpuView) -> Refusal | None:
            if view.gpu.id not in spare:
                return None
            kept = wanted_mib > spare[view.gpu.id] or in_the_way(fence, holder, view, self.state.policy)
            return self.reserved if kept else None

        return check

    def _apply(self, choice: Choice, runtime_s: float) -> None:
        holder = newcomer(choice.ask, runtime_s, self.state.rules, self.now)
        for place, door in enumerate(self.doors):
            if door.view.gpu.id in choice.chosen:
                view = door.view.joined_by(with_others(holder, choice, door.view, self.state.policy))
                self.doors[place] = door_of(view, self.state.rules, self.state.policy)
                self._look_at_spare(view)
        for door in [door for door in self.doors if door.view.gpu.id in choice.chosen]:
            self._tell_beside(door.view)
        self.last_gpu = choice.chosen[-1]

    def _tell_beside(self, joined: GpuView) -> None:
        """Where those who have that GPU have others, too."""
        others = also_on(joined.holders)
        for place, door in enumerate(self.doors):
            if door.view.gpu.id in others:
                self.doors[place] = replace(door, view=door.view.with_beside(joined))

    def overtakes(self, choice: Choice) -> TaskId | None:
        """The fenced task, if this placement took a GPU that it could have used."""
        if self.fence is None:
            return self.overtaken
        ask, rules, policy = self.fence.ask, self.state.rules, self.state.policy
        for door in choice.doors:  # as they were before
            if door.view.gpu.id in choice.chosen and free_at(ask, door, rules, policy, self.now) is not None:
                return ask.task
        return None

    @property
    def over(self) -> bool:
        """Nothing more can start: the line was looked at far enough, or every GPU is closed to everybody."""
        if self.fence is None:
            return False
        if self.behind >= self.state.rules.queue.backfill_depth:
            return True
        return all(door.shut is not None or (door.view.holders and door.busy is not None) for door in self.doors)


def newcomer(ask: Ask, runtime_s: float, rules: Rules, now: float) -> Holder:
    """One that this very walk has sent to a GPU."""
    return Holder(
        key=AttemptKey(ask.task, 0),
        booking_mib=ask.memory_mib,
        alone=ask.alone,
        warming="was sent there just now",
        settles_at=now + rules.warmup.idle_s,
        ends_at=now + runtime_s,
        demand=ask.demand,
        progress=not_begun(now, ask.alone_s),
    )


def with_others(holder: Holder, choice: Choice, view: GpuView, policy: Policy) -> Holder:
    """The newcomer as it is on one of its GPUs, with those who are on the others (as `_beside` in snapshot.py)."""
    if not 1 < len(choice.chosen) <= MOST_BESIDE or policy.against is None:
        return holder
    others = [door.view for door in choice.doors if door.view.gpu.id in choice.chosen and door.view is not view]
    return replace(holder, beside=tuple([Beside(one.gpu.id, holder.demand, one.holders) for one in others]))


def newcomer_turn(state: State, task: Task) -> tuple[int, int, TaskId]:
    """Behind all of its priority."""
    return (1, -task.spec.priority, TaskId(max(state.tasks, default=0) + 1))


def turns(state: State, now: float, walk: Pass, extra: Task | None = None) -> Iterator[Task]:
    """Those whose turn it may be, in order, as long as the walk is worth going on with."""
    for task, may_come in whole_line(state, now, walk, extra):
        if may_come:
            yield task
            if walk.over:
                return


def whole_line(state: State, now: float, due: Due, extra: Task | None = None) -> Iterator[tuple[Task, bool]]:
    """All that wait, in order, each with whether its turn may come; `extra` is one that is not in the queue yet."""
    if state.lanes is None:
        yield from _by_age(state, now, due, extra)
        return
    tasks, lanes = state.tasks, state.lanes
    if extra is not None:
        uid = extra.owner.uid
        lanes = lanes.with_one_more(newcomer_turn(state, extra), uid, state.accounts.level(uid))

    def of(task_id: TaskId) -> Task:
        task = tasks.get(task_id) or extra
        assert task is not None
        return task

    order = InTurn(lanes, lambda task_id: due.cost(of(task_id)))
    for _, _, task_id in order:
        may_come = due.may_come(of(task_id), now)
        if not may_come:
            order.passed_over()
        yield of(task_id), may_come


def _by_age(state: State, now: float, due: Due, extra: Task | None) -> Iterator[tuple[Task, bool]]:
    tasks = state.tasks
    line = state.line
    if extra is not None:
        line = line.copy()
        insort(line, newcomer_turn(state, extra))
    order = ordered(state, line, now)
    for place, (_, _, task_id) in enumerate(order.line):
        due.overtaken = order.overtaken_by(place)
        task = tasks.get(task_id) or extra
        assert task is not None
        yield task, due.may_come(task, now)
