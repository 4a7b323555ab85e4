"""Whether a queued task may start at all, whatever the GPUs are: holds, begin times, dependencies, limits of arrays and
quotas. And what it needs on each GPU."""

from __future__ import annotations

from carma.core.model.decision import RECOVERY, UNKNOWN, Ask
from carma.core.model.status import Estimating, Finished, Queued
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import Record, TaskId
from carma.core.scheduling.fairness import Held, wanted_by
from carma.core.scheduling.quota import PassQuota, limits_of, quota_stop
from carma.core.state import EARLY_S, State
from carma.core.telemetry.pace import belief, correction_of, observed_of_command

DRIVER_MIB = 512  # memory of a GPU that its driver may keep in use while no process is on it


class Waiting(Record, frozen=True):
    """Why a task is not running: a short code for a column, a sentence, and the start of its reservation."""

    code: str
    sentence: str
    reserved_start_at: float | None = None  # None also where the start rests on an assumption


def ask_of(task: Task, state: State, at: float = 0.0) -> Ask:
    """What the task needs: recovery's figure, else the estimate's bound, else the figure for unknown tasks.

    `at`: time passed to the policy, rounded down to AS_OF_S.
    """
    plan = task.plan
    alone = task.spec.exclusive or (plan is not None and plan.rung == "alone")
    if plan is not None and plan.memory_mib is not None:
        memory_mib, source = plan.memory_mib, RECOVERY
    elif task.estimate is not None:
        memory_mib, source = task.estimate.upper_mib, task.estimate.source
    else:
        memory_mib, source = max(state.rules.memory.unknown_mib, _known_minimum_mib(task, state)), UNKNOWN
    gpus = state.usable
    if source != "declared" and gpus:
        # An estimate above every card must not keep the task waiting for ever: it gets the largest card alone. It does
        # not ask for all of it, because the driver keeps some memory of an empty card in use.
        largest_mib = gpus[min(task.spec.gpus, len(gpus)) - 1].memory_mib
        if memory_mib > largest_mib - DRIVER_MIB:
            memory_mib, alone = int(0.9 * largest_mib), True
    alone_s = task.estimate.runtime_s if task.estimate is not None else None
    idle_only = isinstance(task.status, Estimating)
    demand = belief(task, None)
    correction = correction_of(state, task, demand)
    same = observed_of_command(state, task) if demand is None else None
    return Ask(task.id, task.spec.gpus, memory_mib, source, alone, demand, alone_s, at, idle_only, correction, same)


def _known_minimum_mib(task: Task, state: State) -> int:
    """Minimum memory of a task without an estimate: more than what was not enough before."""
    known = [refusal.more_than_mib for refusal in task.no_estimate if refusal.more_than_mib is not None]
    return max(known) + state.rules.recovery.margin_mib if known else 0


def may_start_unestimated(state: State, task: Task, now: float) -> bool:
    """Whether a task has waited long enough for its estimate to start without one, alone on an idle GPU."""
    return isinstance(task.status, Estimating) and now - task.status.since >= state.rules.memory.wait_s - EARLY_S


def why_not_eligible(task: Task, state: State, now: float) -> Waiting | None:
    """Why a queued task may not start, whatever the GPUs are; its user's quota included."""
    early = _why_too_early(task, state, now)
    if early is not None or not state.accounts.limited:
        return early
    held, limits = state.accounts.held(task.owner.uid), limits_of(state.rules.quota, task.owner.name)
    eligibility = Eligibility(state)
    stop = quota_stop(limits, task.owner.name, held, eligibility.wanted(task), eligibility.total_mib)
    return None if stop is None else Waiting("Quota", stop.sentence)


def _why_too_early(task: Task, state: State, now: float) -> Waiting | None:
    """The same without the quota."""
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
    return _array_limit(task, state, 0)


def _array_limit(task: Task, state: State, started: int) -> Waiting | None:
    array = task.spec.array
    if array is None or array.at_once is None:
        return None
    active = state.active_in_array.get(array.array, 0) + started
    if active < array.at_once:
        return None
    verb = "runs" if active == 1 else "run"
    return Waiting("ArrayLimit", f"{active} of its array {verb}; at most {array.at_once} may")


class Eligibility:
    """Which tasks may start in one pass: it counts what the pass has started, per user and per array."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.largest_mib = state.usable[0].memory_mib if state.usable else 0
        self.total_mib = sum([gpu.memory_mib for gpu in state.usable])
        self.quota = PassQuota(state.rules.quota, state.accounts, self.total_mib)
        self.overtaken: TaskId | None = None  # the task before which the current one goes, by the policy's order
        self._stopped: dict[TaskId, Waiting] = {}  # by the quotas of their users or the limits of their arrays
        self._started: dict[TaskId, int] = {}  # array -> tasks that this pass has started

    def wanted(self, task: Task) -> Held:
        return wanted_by(ask_of(task, self.state), self.largest_mib)

    def cost(self, task: Task) -> float:
        """What the task would add to its user's level."""
        return self.state.accounts.level_of_held(task.owner.name, self.wanted(task).cards)

    def may_start(self, task: Task, now: float) -> bool:
        if self.quota.has_stopped(task.owner) or _why_too_early(task, self.state, now) is not None:
            return False
        if task.spec.array is not None:
            full = _array_limit(task, self.state, self._started.get(task.spec.array.array, 0))
            if full is not None:
                self._stopped[task.id] = full
                return False
        return not self.state.accounts.limited or self._quota_stop(task) is None

    def _quota_stop(self, task: Task) -> Waiting | None:
        why = self.quota.stops(task.id, task.owner, lambda: self.wanted(task))
        if why is not None:
            self._stopped[task.id] = Waiting("Quota", why)
        return self._stopped.get(task.id)

    def stop_of(self, task: Task) -> Waiting | None:
        """The quota or the array limit that kept the task from starting in this pass."""
        if task.id not in self._stopped and self.quota.has_stopped(task.owner):
            return self._quota_stop(task)
        return self._stopped.get(task.id)

    def has_started(self, task: Task, ask: Ask) -> None:
        self.quota.add(task.owner, wanted_by(ask, self.largest_mib))
        if task.spec.array is not None:
            array = task.spec.array.array
            self._started[array] = self._started.get(array, 0) + 1
