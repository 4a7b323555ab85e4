"""One walk along the line on a working copy of the GPUs: the first that cannot start is fenced in, and a bounded number
behind it is looked at. Whoever decides, and whoever only wants to know, walks the same way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from math import inf

from msgspec.structs import replace

from carma.core.model.events import TaskPlaced
from carma.core.model.settings import Rules
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import AttemptKey, GpuId, Record, TaskId
from carma.core.scheduling.decision import RECOVERY, UNKNOWN, Ask, Reason
from carma.core.scheduling.fair_order import InTurn
from carma.core.scheduling.fairness import Held, wanted_by
from carma.core.scheduling.gpu_view import MOST_BESIDE, Beside, GpuView, Holder, also_on
from carma.core.scheduling.placement import KeptFor, choose
from carma.core.scheduling.policy import Policy, as_of
from carma.core.scheduling.quota import Tally, limits_of, reached
from carma.core.scheduling.reasons import Choice, conclude
from carma.core.scheduling.reservation import Reservation, free_at, in_the_way, reserve, spare_mib
from carma.core.scheduling.snapshot import expected_runtime_s, not_begun
from carma.core.scheduling.urgency import ordered
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.scheduling.verdicts import Candidate, Requirement, candidate_of, requirement_of
from carma.core.state import State
from carma.core.telemetry.pace import belief

KEPT_VERDICTS = 16  # with each placement, so that `explain` can tell later; more would swell a large server's log
PLACED_AT_ONCE = 64  # placements of one pass; the shell asks again at once, so this bounds a pass and delays no task
DRIVER_MIB = 512  # memory of a GPU that its driver may keep in use while no process is on it


class Waiting(Record, frozen=True):
    """Why a task is not running: a short code for a column, a sentence, and the start that is kept for it."""

    code: str
    sentence: str
    reserved_start_at: float | None = None


def ask_of(task: Task, state: State, at: float = 0.0) -> Ask:
    """What the task needs: recovery's figure, else the estimate's bound, else the figure for the unknown.

    `at`: the time that a policy is told.
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
        gpus = state.usable
        largest = gpus[min(task.spec.gpus, len(gpus)) - 1].memory_mib if gpus else 0
        if memory > largest - DRIVER_MIB and largest > 0:
            memory, alone = int(0.9 * largest), True
    return Ask(task.id, task.spec.gpus, memory, source, alone, belief(task, None), _alone_s(task), at)


def _alone_s(task: Task) -> float | None:
    return task.estimate.runtime_s if task.estimate is not None else None


def _more_than_mib(task: Task, state: State) -> int:
    """Nobody knows what it takes, but somebody may know what was not enough."""
    known = [refusal.more_than_mib for refusal in task.no_estimate if refusal.more_than_mib is not None]
    return max(known) + state.rules.recovery.margin_mib if known else 0


def not_yet(task: Task, state: State, now: float) -> Waiting | None:
    """Why a queued task's turn cannot come, whatever the GPUs say."""
    early = not_due(task, state, now)
    if early is not None or not state.accounts.limited:
        return early
    held, limits = state.accounts.held(task.owner.uid), limits_of(state.rules.quota, task.owner.name)
    found = Due(state)
    stop = reached(limits, task.owner.name, held, found.wanted(task), found.total_mib)
    return None if stop is None else Waiting("Quota", stop.sentence)


def not_due(task: Task, state: State, now: float) -> Waiting | None:
    """The same, whatever its user's other tasks do."""
    spec = task.spec
    if isinstance(task.status, Queued) and task.status.held:
        return Waiting("Held", f"held; `carma release {task.id}` lets it start")
    if state.gpus and (misfit := state.never_fits(spec)) is not None:
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
            return _array_limit(running, spec.array.at_once)
    return None


def _array_limit(running: int, at_once: int) -> Waiting:
    run = "runs" if running == 1 else "run"
    return Waiting("ArrayLimit", f"{running} of its array {run}; at most {at_once} may")


class Due:
    """Whose turn may come at all, on one way along the line: arrays and users have limits."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.largest_mib = state.usable[0].memory_mib if state.usable else 0
        self.total_mib = sum([gpu.memory_mib for gpu in state.usable])
        self.tally = Tally(state.rules.quota, state.accounts, self.total_mib)
        self.stopped: dict[TaskId, Waiting] = {}  # by their users' quotas or their arrays' limits
        self.started: dict[TaskId, int] = {}  # arrays: how many this pass has started
        self.overtaken: TaskId | None = None  # by the one whose turn it is now, before its time (urgent.py)

    def wanted(self, task: Task) -> Held:
        return wanted_by(ask_of(task, self.state), self.largest_mib)

    def cost(self, task: Task) -> float:
        """What it would add to its user's level."""
        return self.state.accounts.ahead(task.owner.name, self.wanted(task).cards)

    def may_come(self, task: Task, now: float) -> bool:
        if self.tally.has_stopped(task.owner):
            return False
        if not_due(task, self.state, now) is not None or self._array_is_full(task):
            return False
        return not self.state.accounts.limited or self._quota_stop(task) is None

    def _quota_stop(self, task: Task) -> Waiting | None:
        why = self.tally.stops(task.id, task.owner, lambda: self.wanted(task))
        if why is not None:
            self.stopped[task.id] = Waiting("Quota", why)
        return self.stopped.get(task.id)

    def stop_of(self, task: Task) -> Waiting | None:
        """What kept the task from its turn in this pass: its user's quota, or its array's limit."""
        if task.id not in self.stopped and self.tally.has_stopped(task.owner):
            return self._quota_stop(task)
        return self.stopped.get(task.id)

    def _array_is_full(self, task: Task) -> bool:
        """Counting the tasks of its array that this pass has started."""
        array = task.spec.array
        if array is None or array.at_once is None:
            return False
        active = self.state.in_array.get(array.array, 0) + self.started.get(array.array, 0)
        if active >= array.at_once:
            self.stopped[task.id] = _array_limit(active, array.at_once)
        return active >= array.at_once


class Pass(Due):
    """One pass over the queue on a working copy of the GPUs. It decides, and what it decided can be explained."""

    def __init__(
        self, state: State, now: float, cache: VerdictCache | None = None, *, explain: TaskId | None = None
    ) -> None:
        super().__init__(state)
        self.now = now
        self.explain = explain  # the task whose decision is wanted in full
        self.candidates = (cache or VerdictCache()).candidates(state, now)
        self._place = {one.view.gpu.id: place for place, one in enumerate(self.candidates)}
        self._open = [one for one in self.candidates if one.open]
        self.last_gpu = state.last_gpu
        self.first_refused: Choice | None = None  # of the first task that cannot start
        self._reservation: Reservation | None = None
        self._reserved: Reason | None = None  # what other tasks are told of its GPUs
        self._spare_mib: dict[GpuId, int] = {}  # on the reserved GPUs, for tasks that outlast the reserved start
        self._behind = 0  # tasks considered after the first that cannot start
        self._refused: dict[tuple[Requirement, float], Choice] = {}

    def consider(self, task: Task) -> Choice:
        """Decide for one task, and change the working copy as if it had been done."""
        ask = ask_of(task, self.state, as_of(self.now))
        runtime_s = expected_runtime_s(task, self.state.rules)
        if self.first_refused is not None:
            self._behind += 1
        same = (requirement_of(ask), -1.0 if self.first_refused is None else runtime_s)
        known = self._refused.get(same)  # GPUs only fill up during a pass: what was refused stays refused
        if known is not None and task.id != self.explain:
            return replace(known, ask=ask)
        choice = self._choose(ask, runtime_s)
        if choice.chosen:
            self._apply(choice, runtime_s)
            self.tally.gave(task.owner, wanted_by(ask, self.largest_mib))
            if task.spec.array is not None:
                self.started[task.spec.array.array] = self.started.get(task.spec.array.array, 0) + 1
        else:
            self._refused[same] = choice
            self.first_refused = self.first_refused or choice
        return choice

    def _choose(self, ask: Ask, runtime_s: float) -> Choice:
        return choose(
            ask,
            self.candidates,
            self.state.policy,
            self.last_gpu,
            idle_first=self.state.rules.placement.idle_first,
            open_ones=self._open,
            kept_for=None if self.first_refused is None else self._kept_for(ask, runtime_s),
            rank_all=ask.task == self.explain,
        )

    @property
    def reservation(self) -> Reservation | None:
        """For the first task that cannot start: worked out when it matters, from the GPUs as they were then."""
        first = self.first_refused
        if self._reservation is None and first is not None:
            state, policy = self.state, self.state.policy
            # A GPU that the policy itself refuses is not kept for the task.
            found = [one for one in first.candidates if (why := first.objection(one)) is None or why.code != "Policy"]
            overtaken = state.overtaken.get(first.ask.task, 0)
            self._reservation = reserve(first.ask, found, state.rules, policy, overtaken, self.now)
            self._reserved = self._reservation.reason(self.now)
            for gpu in self._reservation.gpus:
                self._count_spare(self.candidates[self._place[gpu]].view)
        return self._reservation

    def _count_spare(self, view: GpuView) -> None:
        if self._reservation is not None and view.gpu.id in self._reservation.gpus:
            rules, policy = self.state.rules, self.state.policy
            self._spare_mib[view.gpu.id] = spare_mib(self._reservation, view, rules, policy, self.now)

    def _kept_for(self, ask: Ask, runtime_s: float) -> KeptFor:
        """The filter for tasks after the first that cannot start: GPUs that are kept for it."""
        joining = newcomer(ask, runtime_s, self.state.rules, self.now)
        wanted_mib = inf if ask.alone else ask.memory_mib

        def kept_for(view: GpuView) -> Reason | None:
            reservation = self.reservation
            spare_mib = self._spare_mib.get(view.gpu.id)
            if reservation is None or reservation.start_at is None or spare_mib is None:
                return None
            if reservation.degree == 1 and self.now + runtime_s <= reservation.start_at:
                return None  # it should be gone by then
            if wanted_mib <= spare_mib and not in_the_way(reservation, joining, view, self.state.policy):
                return None
            return self._reserved

        return kept_for

    def _apply(self, choice: Choice, runtime_s: float) -> None:
        rules, policy = self.state.rules, self.state.policy
        holder = newcomer(choice.ask, runtime_s, rules, self.now)
        joined: list[GpuView] = []
        for gpu in choice.chosen:
            view = self.candidates[self._place[gpu]].view
            view = view.joined_by(with_others(holder, choice, view, policy))
            self._replace(candidate_of(view, rules, policy))
            self._count_spare(view)
            joined.append(view)
        for view in joined:
            for other in also_on(view.holders) & self._place.keys():
                seen = self.candidates[self._place[other]].view.with_beside(view)
                self._replace(candidate_of(seen, rules, policy))
        self._open = [one for one in self.candidates if one.open]
        self.last_gpu = choice.chosen[-1]

    def _replace(self, candidate: Candidate) -> None:
        self.candidates[self._place[candidate.view.gpu.id]] = candidate

    def overtakes(self, choice: Choice) -> TaskId | None:
        """The task with the reservation, if this placement took a GPU that it could have used."""
        reservation = self.reservation
        if reservation is None:
            return self.overtaken
        ask, rules, policy = reservation.ask, self.state.rules, self.state.policy
        for one in choice.candidates:  # as they were before
            if one.view.gpu.id in choice.chosen and free_at(ask, one, rules, policy, self.now) is not None:
                return ask.task
        return None

    @property
    def over(self) -> bool:
        """Nothing more can start: enough tasks were considered, or every GPU is closed to all of them."""
        if self.first_refused is None:
            return False
        if self._behind >= self.state.rules.queue.backfill_depth:
            return True
        return all(one.closed is not None or (one.view.holders and one.busy is not None) for one in self.candidates)


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
    if not 1 < len(choice.chosen) <= MOST_BESIDE or policy.objection is None:
        return holder
    others = [one.view for one in choice.candidates if one.view.gpu.id in choice.chosen and one.view is not view]
    return replace(holder, beside=tuple([Beside(one.gpu.id, holder.demand, one.holders) for one in others]))


def newcomer_turn(state: State, task: Task) -> tuple[int, int, TaskId]:
    """Behind all of its priority."""
    return (1, -task.spec.priority, TaskId(max(state.tasks, default=0) + 1))


def turns(state: State, now: float, walk: Pass, extra: Task | None = None) -> Iterator[Task]:
    """Those whose turn it may be, in order, as long as the walk is worth going on with."""
    for task, may_come in whole_line(state, now, walk, extra, leave_out_stopped=True):
        if may_come:
            yield task
            if walk.over:
                return


def whole_line(
    state: State, now: float, due: Due, extra: Task | None = None, *, leave_out_stopped: bool = False
) -> Iterator[tuple[Task, bool]]:
    """All that wait, in order, each with whether its turn may come; `extra` is one that is not in the queue yet.
    `leave_out_stopped`: where users take turns, without the tasks behind one that is at its user's quota."""
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
        task = of(task_id)
        may_come = due.may_come(task, now)
        if not may_come:
            order.passed_over()
            if leave_out_stopped and due.tally.has_stopped(task.owner):
                order.leave_out(task.owner.uid)
        yield task, may_come


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


def schedule(state: State, now: float, cache: VerdictCache | None = None) -> list[TaskPlaced]:
    """The placements that are due."""
    placed: list[TaskPlaced] = []
    if not state.line or not state.gpus:
        return placed
    walk = Pass(state, now, cache)
    for task in turns(state, now, walk):
        choice = walk.consider(task)
        if not choice.chosen:
            continue
        decision = conclude(choice, state.policy.name, now, KEPT_VERDICTS)
        assert decision.placement is not None
        key = AttemptKey(task.id, task.key.attempt + 1)
        overtaken = walk.overtakes(choice)
        placed.append(TaskPlaced(now, key, decision.placement, decision.reason, overtaken, decision.verdicts))
        if len(placed) >= PLACED_AT_ONCE:
            break
    return placed
