"""Keeps a large task from being starved: the first task that cannot start gets GPUs and a start time, and those behind
it may only go before it where they do not push that start back.

Three degrees. While few have overtaken it, later tasks may use its GPUs if they should be gone by its start or if it
still fits beside them. After `overtakes` of them its GPUs are kept for it alone. After twice as many, every GPU that
could ever hold it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from carma.core.model.decision import Ask, Reason
from carma.core.model.settings import Rules
from carma.core.model.units import show_s
from carma.core.model.values import GpuId, Record, TaskId
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy
from carma.core.scheduling.verdicts import Candidate, requirement_of, takes_tasks, tasks_allowed


class Reservation(Record, frozen=True, kw_only=True):
    ask: Ask
    gpus: frozenset[GpuId]
    start_at: float | None  # None: no GPU can be named (drained, lost, ...)
    degree: int  # 1: not delayed, 2: its GPUs kept, 3: every GPU that could hold it kept
    doubtful: Holder | None = None  # a task whose end decides the start and is not certain
    assumed_s: float = 0.0  # `queue.assumed_runtime_s`

    def reason(self, now: float) -> Reason:
        """Why other tasks do not get its GPUs."""
        return Reason("Reserved", _reserved, (self.ask.task, self, now))

    def start_phrase(self, now: float) -> str:
        """When the task should start, and on which assumption."""
        wait_s = show_s(max(0.0, (self.start_at or now) - now))
        if self.doubtful is None:
            return f"should start in {wait_s}"
        task, assumed_s = self.doubtful.key.task, show_s(self.assumed_s)
        match self.doubtful.end_doubt:
            case "assumed":
                return (
                    f"should start in about {wait_s}, if task {task} takes {assumed_s}: it has no time limit (--time)"
                )
            case "assumed_over":
                late = f"task {task} has run longer than the assumed {assumed_s} and has no time limit (--time)"
            case _:
                late = f"task {task} has run longer than estimated"
        return f"has no known start: {late}"


def _reserved(task: TaskId, reservation: Reservation, now: float) -> str:
    return f"is reserved for task {task}, which {reservation.start_phrase(now)}"


def reserve(
    ask: Ask, candidates: Sequence[Candidate], rules: Rules, policy: Policy, overtaken: int, now: float
) -> Reservation:
    """The GPUs on which the task should be able to start first, by what the running tasks are expected to take."""
    degree = 1 + (overtaken >= rules.queue.overtakes) + (overtaken >= 2 * max(1, rules.queue.overtakes))
    times = sorted(
        (at, one.view.gpu.index, one.view.gpu.id)
        for one in candidates
        if (at := free_at(ask, one, rules, policy, now)) is not None
    )
    if len(times) < ask.gpus:
        return Reservation(ask=ask, gpus=frozenset(), start_at=None, degree=degree)
    chosen = times[: ask.gpus] if degree < 3 else times
    kept = frozenset(gpu for _, _, gpu in chosen)
    return Reservation(
        ask=ask,
        gpus=kept,
        start_at=times[ask.gpus - 1][0],
        degree=degree,
        doubtful=_doubtful(candidates, {gpu: at for at, _, gpu in times[: ask.gpus]}),
        assumed_s=rules.queue.assumed_runtime_s,
    )


def _doubtful(candidates: Sequence[Candidate], free: Mapping[GpuId, float]) -> Holder | None:
    """The least certain of the tasks that are expected to leave before the GPUs are free, the last of them."""
    leaving = [
        holder
        for one in candidates
        if one.view.gpu.id in free
        for holder in one.view.holders
        if holder.end_doubt is not None and holder.ends_at <= free[one.view.gpu.id]
    ]
    return max(leaving, key=lambda holder: (holder.end_doubt != "assumed", holder.ends_at), default=None)


def free_at(ask: Ask, candidate: Candidate, rules: Rules, policy: Policy, now: float) -> float | None:
    """When the GPU could take the task, holders leaving as expected; None if it never could as things stand."""
    view = candidate.view
    if view.fault is not None or view.drained is not None or not takes_tasks(view.gpu, rules):
        return None
    if view.outdated:
        return now + rules.window.stale_s  # the next sample tells
    if view.room_mib is None:
        return None
    reason, requirement = candidate.refuse(ask), requirement_of(ask)
    if reason is None and candidate.objection(ask, requirement) is None:
        return now
    if reason is not None and reason.code == "WarmUp":
        settled = (min(holder.settles_at, holder.ends_at) for holder in view.holders if holder.settles_at is not None)
        at = max(now, *settled)
        if policy.refusal(_later(ask, at, policy), view.after(at)[0]) is None:
            return at
    if reason is not None and reason.code == "Metrics" and view.blind is not None:
        return now + rules.window.stale_s
    if requirement not in candidate.room_at:
        candidate.room_at[requirement] = _room_at(ask, view, rules, policy)
    return candidate.room_at[requirement]


def _room_at(ask: Ask, view: GpuView, rules: Rules, policy: Policy) -> float | None:
    """When enough holders have ended."""
    for at in sorted({holder.ends_at for holder in view.holders}):
        holders, room_mib = view.after(at)
        if fits(_later(ask, at, policy), holders, room_mib, rules, policy):
            return at
    return None


def fits(ask: Ask, holders: Sequence[Holder], room_mib: int, rules: Rules, policy: Policy) -> bool:
    """Whether the task fits together with those holders, by memory and by what does not change while they run."""
    if not holders:
        return ask.memory_mib <= room_mib
    if ask.alone or not _may_join(holders, rules, policy, 1):
        return False
    return ask.memory_mib <= room_mib - rules.memory.margin_mib and policy.refusal(ask, holders) is None


def _may_join(holders: Sequence[Holder], rules: Rules, policy: Policy, newcomers: int) -> bool:
    if not policy.shares or any(holder.alone for holder in holders):
        return False
    return len(holders) + newcomers <= tasks_allowed(rules)


def spare_mib(reservation: Reservation, view: GpuView, rules: Rules, policy: Policy) -> int:
    """What a task that outlasts the reserved start may book on that GPU without delaying it; negative: nothing."""
    assert reservation.start_at is not None
    if reservation.degree > 1 or reservation.ask.alone:
        return -1
    holders, room_mib = view.after(reservation.start_at)
    if not _may_join(holders, rules, policy, 2):
        return -1
    return room_mib - rules.memory.margin_mib - reservation.ask.memory_mib


def in_the_way(
    reservation: Reservation, newcomer: Holder, view: GpuView, rules: Rules, policy: Policy, now: float
) -> bool:
    """Whether that newcomer delays the reserved start although memory allows both: it keeps the GPU closed for too
    long, or the policy objects to the first task beside it."""
    if newcomer.closes and rules.warmup.enabled and now + rules.warmup.settle_s > (reservation.start_at or now):
        return True
    if policy.objection is None or reservation.start_at is None or newcomer.ends_at <= reservation.start_at:
        return False
    staying, _ = view.after(reservation.start_at)
    later = _later(reservation.ask, reservation.start_at, policy)
    return policy.refusal(later, (*staying, newcomer)) is not None


def _later(ask: Ask, at: float, policy: Policy) -> Ask:
    return ask if policy.objection is None else replace(ask, at=at)
