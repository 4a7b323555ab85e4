"""The state of a server. Changed by `machine.step` alone.

1. The logged part (`tasks`, `gpus`, `drained`, ...) and its indices: a replay rebuilds it exactly.
2. The observed part (`live`, `tracks`, `usage`): it is empty after a restart and fills with the next samples. UseNoted
   and the checkpoint keep what would be costly to lose: idle power, peaks and energy, which attempts have settled, and
   learned corrections of rates.

It holds no caches: whatever `propose` remembers lies outside (scheduling/verdict_cache.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from typing import TypeVar

from carma.core.model.outcome import Cancelled, NeverFits, Outcome, describe_to_others, satisfied
from carma.core.model.settings import Rules
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Running, Starting
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, Correction, Demand, Gpu, GpuId, Placement, TaskId, TaskSpec
from carma.core.notices import long_wait_at
from carma.core.scheduling.fair_order import FairQueue, QueueKey
from carma.core.scheduling.fairness import Accounts
from carma.core.scheduling.feasibility import never_fits, usable
from carma.core.scheduling.policy import Policy
from carma.core.telemetry.measurements import Hour, Live, Track

SERVER = ""  # the key in `drained` that stands for the whole server
EARLY_S = 0.001  # a time that is due may be computed in two ways that differ in their last bits

Name = TypeVar("Name")


class InvalidEvent(Exception):
    """An event that contradicts the state: a defect of the code that emitted it."""


class State:
    def __init__(self, rules: Rules, policy: Policy) -> None:
        self.rules = rules
        self.policy = policy.bound(rules)
        self.now = 0.0
        self.tasks: dict[TaskId, Task] = {}
        self.gpus: dict[GpuId, Gpu] = {}
        self.drained: dict[str, str] = {}
        self.last_gpu: GpuId | None = None
        self.overtaken: dict[TaskId, int] = {}
        self.accounts = Accounts(rules)  # what users have used and hold now; updated by `put`
        # Indices over `tasks`, updated by `put`:
        self.queue: list[QueueKey] = []  # queued and not held, sorted
        self.fair_queue = FairQueue() if rules.fairness.enabled else None  # the same with fair shares
        self.estimating: list[QueueKey] = []  # being estimated and not held, sorted
        self.active: dict[TaskId, AttemptKey] = {}  # starting or running
        self.between_attempts: set[TaskId] = set()  # ended or recovering
        self.preempting: set[TaskId] = set()  # running, and asked to checkpoint and leave
        self.on_gpu: dict[GpuId, dict[AttemptKey, Placement]] = {}
        self.dependents: dict[TaskId, set[TaskId]] = {}  # task -> tasks that depend on it
        self.active_in_array: dict[TaskId, int] = {}  # array -> number of its active tasks
        self.impossible: dict[TaskId, Outcome] = {}  # waiting tasks that can never start, and why
        self.deadlines: list[tuple[float, TaskId]] = []  # sorted: when a limit, its warning or a long wait is due
        self.usable: tuple[Gpu, ...] = ()  # the GPUs that take tasks, largest first
        self.versions: dict[GpuId, int] = {}  # increased with every change that concerns the GPU; see `touch`
        # Observed, not logged:
        self.live: dict[GpuId, Live] = {}
        self.tracks: dict[AttemptKey, Track] = {}
        self.idle_w: dict[GpuId, float] = {}  # lowest mean power of each GPU while it was unused
        self.usage: dict[tuple[int, GpuId], Hour] = {}  # by hour and GPU; see usage.py
        self.corrections: dict[str, Correction] = {}  # by command, the newest last; see pace.py
        self.new_corrections: set[str] = set()  # those that no UseNoted has stored yet
        self.commands: dict[str, Demand] = {}  # demands observed of tasks on one GPU, by command; see pace.py
        self.shown_on: dict[TaskId, set[GpuId]] = {}  # task -> GPUs whose newest sample shows its processes
        # Candidates that `propose` checks; a sample removes those that are not due any more:
        self.over_booking: set[GpuId] = set()  # shared GPUs on which a task may hold more than it booked
        self.grown: set[TaskId] = set()  # active tasks whose peak memory may have to be stored
        self.idle: set[TaskId] = set()  # active tasks that became idle holders, or are none any more
        self.settled: set[TaskId] = set()  # active tasks whose booking may shrink

    def set_gpus(self, gpus: Iterable[Gpu]) -> None:
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.usable = usable(self.gpus.values(), self.rules)
        self.live = {gpu: self.live.get(gpu) or Live(self.rules.window.length_s) for gpu in self.gpus}
        for task in self.tasks.values():
            self._check_possible(task)

    def put(self, task: Task) -> None:
        """Store a task and keep every index true."""
        before = self.tasks.get(task.id)
        self._account(before, task)
        self.tasks[task.id] = task
        placement = None if before is None else _still_on(before, task)
        if placement is not None:
            self._stay(task, placement)
        else:
            if before is not None:
                self._unindex(before)
            self._index(task)
        self._set_deadline(before, task)
        self._check_possible(task)
        for gpu in self.shown_on.get(task.id, ()):
            self.touch(gpu)

    def drop(self, task_id: TaskId) -> None:
        task = self.tasks.pop(task_id)
        self._account(task, None)
        self._unindex(task)
        self._set_deadline(task, None)
        self.overtaken.pop(task_id, None)
        self.impossible.pop(task_id, None)
        for waiting in self.dependents.get(task_id, ()):
            self._check_possible(self.tasks[waiting])
        for gpu in self.shown_on.get(task_id, ()):
            self.touch(gpu)

    def _set_deadline(self, before: Task | None, task: Task | None) -> None:
        old_at = None if before is None else due_at(before, self.rules)
        new_at = None if task is None else due_at(task, self.rules)
        if old_at != new_at and before is not None and old_at is not None:
            del self.deadlines[bisect_left(self.deadlines, (old_at, before.id))]
        if old_at != new_at and task is not None and new_at is not None:
            insort(self.deadlines, (new_at, task.id))

    def never_fits(self, spec: TaskSpec) -> str | None:
        """Why such a task could never run on the GPUs as they are; a sentence."""
        return never_fits(spec, self.usable, len(self.gpus), self.rules)

    def _check_possible(self, task: Task) -> None:
        outcome = self.outcome_if_impossible(task)
        if outcome is not None:
            self.impossible[task.id] = outcome
        else:
            self.impossible.pop(task.id, None)

    def outcome_if_impossible(self, task: Task) -> Outcome | None:
        """The end of a waiting task that can never start: a dependency ended otherwise, or no GPU is large enough."""
        if not isinstance(task.status, Estimating | Queued | Recovering):
            return None
        for dependency in task.spec.after if not isinstance(task.status, Recovering) else ():
            other = self.tasks.get(dependency.task)
            if other is None or not isinstance(other.status, Finished):
                continue
            outcome = other.status.outcome
            if not satisfied(dependency, outcome):
                ended = describe_to_others(outcome)
                reason = f"it waited for task {other.id} to {dependency.wanted_end}, but that task {ended}"
                return Cancelled("carma", reason)
        if not self.gpus or self.rules.queue.misfits != "end":
            return None
        misfit = self.never_fits(task.spec)
        return None if misfit is None else NeverFits(misfit)

    def _account(self, before: Task | None, task: Task | None) -> None:
        """Counts the task in its user's account, which determines the user's turn."""
        all_moved = self.accounts.minute(self.now)
        moved = self.accounts.follow(before, task, self.gpus, self.now)
        known = task or before
        if self.fair_queue is None or known is None or not (moved or all_moved):
            return
        for uid in self.fair_queue.users() if all_moved else (known.owner.uid,):
            self.fair_queue.set_level(uid, self.accounts.level(uid))

    def touch(self, gpu: GpuId) -> None:
        """Increase the version of a GPU after any change that concerns it: its tasks, their progress, its samples. The
        GPUs with which it shares a task change too, for policies that judge several GPUs together."""
        versions = self.versions
        versions[gpu] = versions.get(gpu, 0) + 1
        if self.policy.objection is None:
            return
        for placement in self.on_gpu.get(gpu, {}).values():
            for other in placement.gpus if len(placement.gpus) > 1 else ():
                versions[other] = versions.get(other, 0) + 1

    def _moved(self, gpu: GpuId) -> None:
        """The tasks on the GPU, or their order, have changed."""
        live = self.live.get(gpu)
        if live is not None:
            live.members = None
        if len(self.on_gpu.get(gpu, ())) > 1:
            self.over_booking.add(gpu)
        self.touch(gpu)

    def _stay(self, task: Task, placement: Placement) -> None:
        """A task that stays active and has changed moves to the end of every index."""
        key = self.active[task.id] = self.active.pop(task.id)
        for gpu in placement.gpus:
            held = self.on_gpu[gpu]
            held[key] = held.pop(key)
            self._moved(gpu)
        self._check_use(task)

    def _check_use(self, task: Task) -> None:
        """`propose` has to check the peak memory and the booking of an active task."""
        self.grown.add(task.id)
        self.settled.add(task.id)
        self.idle.add(task.id)

    def _index(self, task: Task) -> None:
        match task.status:
            case Queued(held=False):
                insort(self.queue, queue_key(task))
                if self.fair_queue is not None:
                    self.fair_queue.add(queue_key(task), task.owner.uid, self.accounts.level(task.owner.uid))
            case Estimating(held=False):
                insort(self.estimating, queue_key(task))
            case Starting(placement=placement) | Running(placement=placement):
                self.active[task.id] = task.key
                for gpu in placement.gpus:
                    self.on_gpu.setdefault(gpu, {})[task.key] = placement
                    self._moved(gpu)
                self._count_array(task, +1)
                self._check_use(task)
                if isinstance(task.status, Running) and task.status.preempting is not None:
                    self.preempting.add(task.id)
            case Ended() | Recovering():
                self.between_attempts.add(task.id)
            case _:
                pass
        for waiting in self.dependents.get(task.id, ()):
            self._check_possible(self.tasks[waiting])
        if isinstance(task.status, Finished):
            return
        for dependency in task.spec.after:
            self.dependents.setdefault(dependency.task, set()).add(task.id)

    def _unindex(self, task: Task) -> None:
        match task.status:
            case Queued(held=False):
                place = bisect_left(self.queue, queue_key(task))
                del self.queue[place]
                if self.fair_queue is not None:
                    self.fair_queue.remove(queue_key(task), task.owner.uid)
            case Estimating(held=False):
                del self.estimating[bisect_left(self.estimating, queue_key(task))]
            case Starting(placement=placement) | Running(placement=placement):
                del self.active[task.id]
                self.preempting.discard(task.id)
                self.grown.discard(task.id)
                self.idle.discard(task.id)
                self.settled.discard(task.id)
                for gpu in placement.gpus:
                    del self.on_gpu[gpu][task.key]
                    self._moved(gpu)
                self._count_array(task, -1)
            case Ended() | Recovering():
                self.between_attempts.discard(task.id)
            case _:
                pass
        for dependency in task.spec.after:
            waiting = self.dependents.get(dependency.task)
            if waiting is not None:
                waiting.discard(task.id)
                if not waiting:
                    del self.dependents[dependency.task]

    def _count_array(self, task: Task, change: int) -> None:
        if task.spec.array is not None:
            array = task.spec.array.array
            self.active_in_array[array] = self.active_in_array.get(array, 0) + change
            if not self.active_in_array[array]:
                del self.active_in_array[array]

    def live_of(self, gpu: GpuId) -> Live:
        live = self.live.get(gpu)
        if live is None:
            live = self.live[gpu] = Live(self.rules.window.length_s)
        return live

    def empty_w(self) -> dict[GpuId, float]:
        """The lowest power reading of each unused GPU that `idle_w` does not have yet."""
        read = {gpu: live.empty_w for gpu, live in self.live.items() if gpu not in self.idle_w}
        return {gpu: watts for gpu, watts in read.items() if watts is not None}


def due_at(task: Task, rules: Rules) -> float | None:
    """When its time limit, the warning before it, or the notice of its long wait is due; None: never."""
    status, limit_s = task.status, task.spec.time_limit_s
    if isinstance(status, Queued):
        return long_wait_at(task, rules.notify)
    if limit_s is None or not isinstance(status, Running) or status.ending is not None or status.paused is not None:
        return None
    warn = task.spec.warn
    before_s = warn.before_s if warn is not None and not status.warned else 0.0
    return status.since + task.attempts[-1].paused_s + limit_s - max(0.0, before_s)


def in_order(names: Collection[Name], order: Collection[Name]) -> list[Name]:
    """These names in the order of `order`, without those that it lacks: simultaneous events have a fixed order."""
    if len(names) < 2:
        return [name for name in names if name in order]
    return [name for name in order if name in names]


def _still_on(before: Task, task: Task) -> Placement | None:
    """The task's place, if its status changed but it stays active in the same indices."""
    status = task.status
    if status is not before.status or task.spec is not before.spec or len(task.attempts) != len(before.attempts):
        return None
    return status.placement if isinstance(status, Running | Starting) and not task.spec.after else None


def queue_key(task: Task) -> QueueKey:
    """The order of the queue: innocent victims of an OOM, then priority, then age."""
    first = task.plan is not None and task.plan.first
    return (0 if first else 1, -task.spec.priority, task.id)
