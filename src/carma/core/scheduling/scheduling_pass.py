"""The scheduling pass: it decides for the queued tasks in order, on a working copy of the GPUs.

1. The first task that cannot start gets a reservation (reservation.py).
2. At most `queue.backfill_depth` tasks behind it are considered; they must not delay the reservation.
3. What it decides can be explained: `schedule` and explanation.py run the same pass.

It changes nothing in the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from math import inf

from msgspec.structs import replace

from carma.core.model.decision import RECOVERY, UNKNOWN, Ask, Reason
from carma.core.model.events import TaskPlaced
from carma.core.model.settings import Rules
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, GpuId, TaskId
from carma.core.scheduling.eligibility import Eligibility, ask_of, may_start_unestimated
from carma.core.scheduling.gpu_view import MAX_JOINT_GPUS, GpuView, Holder, OtherGpu, other_gpus_of
from carma.core.scheduling.placement import KeptFor, choose
from carma.core.scheduling.policy import Policy, as_of
from carma.core.scheduling.queue_order import queued_tasks
from carma.core.scheduling.reasons import Choice, conclude
from carma.core.scheduling.reservation import Reservation, free_at, in_the_way, reserve, spare_mib
from carma.core.scheduling.snapshot import end_doubt, expected_runtime_s, not_begun
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.scheduling.verdicts import Candidate, Requirement, candidate_of, requirement_of
from carma.core.state import State

LOGGED_VERDICTS = 16  # verdicts logged with each placement, for `explain`; more would swell the log of a large server
MAX_PLACEMENTS = 64  # placements of one pass; the shell proposes again at once, so this delays no task


class SchedulingPass(Eligibility):
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
        self._reserved: Reason | None = None  # why other tasks do not get its GPUs
        self._spare_mib: dict[GpuId, int] = {}  # on the reserved GPUs, for tasks that outlast the reserved start
        self._considered_behind = 0  # tasks after the first that cannot start
        self._refused: dict[tuple[Requirement, float], Choice] = {}

    def tasks(self, extra: Task | None = None) -> Iterator[Task]:
        """The eligible tasks in order, until no more can start. `extra`: a task that is not in the queue yet."""
        for task, may_start in queued_tasks(self.state, self.now, self, extra, skip_stopped=True):
            if may_start:
                yield task
                if self._over:
                    return

    def unestimated_tasks(self) -> Iterator[Task]:
        """Tasks that are still being estimated and may start on an idle GPU, in order. They come after those in the
        queue, and no GPU is reserved for them."""
        for _, _, task_id in islice(self.state.estimating, 1 + self.state.rules.queue.backfill_depth):
            if not any(one.view.idle for one in self._open):
                return
            task = self.state.tasks[task_id]
            if may_start_unestimated(self.state, task, self.now) and self.may_start(task, self.now):
                yield task

    def consider(self, task: Task) -> Choice:
        """Decide for one task, and change the working copy as if it had been done."""
        ask = ask_of(task, self.state, as_of(self.now))
        runtime_s = expected_runtime_s(task, self.state.rules)
        if self.first_refused is not None:
            self._considered_behind += 1
        same = (requirement_of(ask), -1.0 if self.first_refused is None else runtime_s)
        known = self._refused.get(same)  # GPUs only fill up during a pass: what was refused stays refused
        if known is not None and task.id != self.explain:
            return replace(known, ask=ask)
        choice = self._choose(ask, runtime_s)
        if choice.chosen:
            self._apply(
                choice, replace(newcomer(ask, runtime_s, self.state.rules, self.now), end_doubt=end_doubt(task))
            )
            self.has_started(task, ask)
        else:
            self._refused[same] = choice
            if not ask.idle_only:
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
        """The reservation of the first task that cannot start. It is computed when a later task first needs it."""
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

    def reservation_of(self, task: TaskId) -> Reservation | None:
        """The reservation, if it is that task's."""
        reservation = self.reservation
        return reservation if reservation is not None and reservation.ask.task == task else None

    def _count_spare(self, view: GpuView) -> None:
        if self._reservation is not None and view.gpu.id in self._reservation.gpus:
            self._spare_mib[view.gpu.id] = spare_mib(self._reservation, view, self.state.rules, self.state.policy)

    def _kept_for(self, ask: Ask, runtime_s: float) -> KeptFor:
        """The filter for tasks after the first that cannot start: GPUs that are kept for it."""
        rules, policy = self.state.rules, self.state.policy
        joining = newcomer(ask, runtime_s, rules, self.now)
        wanted_mib = inf if ask.alone else ask.memory_mib

        def kept_for(view: GpuView) -> Reason | None:
            reservation = self.reservation
            spare_mib = self._spare_mib.get(view.gpu.id)
            if reservation is None or reservation.start_at is None or spare_mib is None:
                return None
            if reservation.degree == 1 and self.now + runtime_s <= reservation.start_at:
                return None  # it should be gone by then
            if wanted_mib <= spare_mib and not in_the_way(reservation, joining, view, rules, policy, self.now):
                return None
            return self._reserved

        return kept_for

    def _apply(self, choice: Choice, holder: Holder) -> None:
        rules, policy = self.state.rules, self.state.policy
        joined: list[GpuView] = []
        for gpu in choice.chosen:
            view = self.candidates[self._place[gpu]].view
            view = view.joined_by(with_others(holder, choice, view, policy))
            self._replace(candidate_of(view, rules, policy))
            self._count_spare(view)
            joined.append(view)
        for view in joined:
            for other in other_gpus_of(view.holders) & self._place.keys():
                seen = self.candidates[self._place[other]].view.with_neighbour(view)
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
    def _over(self) -> bool:
        """Nothing more can start: enough tasks were considered, or every GPU is closed to all of them."""
        if self.first_refused is None:
            return False
        if self._considered_behind >= self.state.rules.queue.backfill_depth:
            return True
        return all(one.closed is not None or (one.view.holders and one.busy is not None) for one in self.candidates)


def newcomer(ask: Ask, runtime_s: float, rules: Rules, now: float) -> Holder:
    """A task that this pass has placed on a GPU."""
    return Holder(
        key=AttemptKey(ask.task, 0),
        booking_mib=ask.memory_mib,
        alone=ask.alone,
        warming="was sent there just now",
        settles_at=now + rules.warmup.idle_s,
        closes=not rules.sharing.caps or ask.source in (UNKNOWN, RECOVERY),
        ends_at=now + runtime_s,
        demand=ask.demand,
        correction=ask.correction,
        progress=not_begun(now, ask.alone_s),
    )


def with_others(holder: Holder, choice: Choice, view: GpuView, policy: Policy) -> Holder:
    """The new task as it is on one of its GPUs, with the tasks on the others (as `_beside` in snapshot.py)."""
    if not 1 < len(choice.chosen) <= MAX_JOINT_GPUS or policy.objection is None:
        return holder
    others = [one.view for one in choice.candidates if one.view.gpu.id in choice.chosen and one.view is not view]
    return replace(holder, other_gpus=tuple([OtherGpu(one.gpu.id, holder.demand, one.holders) for one in others]))


def schedule(state: State, now: float, cache: VerdictCache | None = None) -> list[TaskPlaced]:
    """The placements that are due."""
    placed: list[TaskPlaced] = []
    if not (state.queue or state.estimating) or not state.gpus:
        return placed
    scheduling = SchedulingPass(state, now, cache)
    for task in chain(scheduling.tasks(), scheduling.unestimated_tasks()):
        choice = scheduling.consider(task)
        if not choice.chosen:
            continue
        decision = conclude(choice, state.policy.name, now, LOGGED_VERDICTS)
        assert decision.placement is not None
        key = AttemptKey(task.id, task.key.attempt + 1)
        overtaken = scheduling.overtakes(choice)
        placed.append(TaskPlaced(now, key, decision.placement, decision.reason, overtaken, decision.verdicts))
        if len(placed) >= MAX_PLACEMENTS:
            break
    return placed
