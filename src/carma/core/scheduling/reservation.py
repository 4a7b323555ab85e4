"""Keeps a large task from being starved: the first task that cannot start gets GPUs and a start time, and those behind
it may only go before it where they do not push that start back.

Three degrees. While few have overtaken it, later tasks may use its GPUs if they should be gone by its start or if it
still fits beside them. After `overtakes` of them its GPUs are kept for it alone. After twice as many, every GPU that
could ever hold it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.units import show_s
from carma.core.model.values import GpuId, Record
from carma.core.scheduling.decision import Ask, Refusal
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy
from carma.core.scheduling.verdicts import Door, takes_tasks, tasks_allowed


class Fence(Record, frozen=True, kw_only=True):
    ask: Ask
    gpus: frozenset[GpuId]
    start_at: float | None  # None: no GPU can be named (drained, lost, ...)
    degree: int  # 1: not delayed, 2: its GPUs kept, 3: every GPU that could hold it kept

    def refusal(self, now: float) -> Refusal:
        wait = show_s(max(0.0, (self.start_at or now) - now))
        return Refusal("Reserved", f"is reserved for task {self.ask.task}, which should start in {wait}")


def reserve(ask: Ask, doors: Sequence[Door], rules: Rules, policy: Policy, overtaken: int, now: float) -> Fence:
    """The GPUs on which the task should be able to start first, by what the running tasks are expected to take."""
    degree = degree_of(overtaken, rules)
    times = sorted(
        (at, door.view.gpu.index, door.view.gpu.id)
        for door in doors
        if (at := free_at(ask, door, rules, policy, now)) is not None
    )
    if len(times) < ask.gpus:
        return Fence(ask=ask, gpus=frozenset(), start_at=None, degree=degree)
    chosen = times[: ask.gpus] if degree < 3 else times
    kept = frozenset(gpu for _, _, gpu in chosen)
    return Fence(ask=ask, gpus=kept, start_at=times[ask.gpus - 1][0], degree=degree)


def degree_of(overtaken: int, rules: Rules) -> int:
    return 1 + (overtaken >= rules.queue.overtakes) + (overtaken >= 2 * max(1, rules.queue.overtakes))


def free_at(ask: Ask, door: Door, rules: Rules, policy: Policy, now: float) -> float | None:
    """When the GPU could take it, holders leaving as expected; None if it never could as things stand.

    As long as nothing of the GPU changes, this never becomes earlier (doors.py builds on that).
    """
    view = door.view
    if view.fault is not None or view.drained is not None or not takes_tasks(view.gpu, rules):
        return None
    if view.outdated:
        return now + rules.window.stale_s  # the next sample tells
    if view.room_mib is None:
        return None
    refusal = door.refuse(ask)
    if refusal is None and not policy.opposes(ask, view.holders):
        return now
    if refusal is not None and refusal.code == "WarmUp":
        settled = (min(holder.settles_at, holder.ends_at) for holder in view.holders if holder.settles_at is not None)
        at = max(now, *settled)
        if not policy.opposes(_later(ask, at, policy), view.after(at)[0]):
            return at
    if refusal is not None and refusal.code == "Metrics" and view.blind is not None:
        return now + rules.window.stale_s
    for at in sorted({holder.ends_at for holder in view.holders}):
        holders, room_mib = view.after(at)
        if fits(_later(ask, at, policy), holders, room_mib, rules, policy):
            return at
    return None


def fits(ask: Ask, holders: Sequence[Holder], room_mib: int, rules: Rules, policy: Policy) -> bool:
    """Beside those holders, by memory and by what does not change while they run."""
    if not holders:
        return ask.memory_mib <= room_mib
    if ask.alone or not _may_join(holders, rules, policy, 1):
        return False
    return ask.memory_mib <= room_mib - rules.memory.margin_mib and not policy.opposes(ask, holders)


def _may_join(holders: Sequence[Holder], rules: Rules, policy: Policy, newcomers: int) -> bool:
    if not policy.shares or any(holder.alone for holder in holders):
        return False
    return len(holders) + newcomers <= tasks_allowed(rules)


def spare_mib(fence: Fence, view: GpuView, rules: Rules, policy: Policy, now: float) -> int:
    """What a task that outlasts the reserved start may book on that GPU without delaying it; negative: nothing.

    A newcomer closes the GPU until it has settled, so one that comes too shortly before the start delays it too.
    """
    assert fence.start_at is not None
    if fence.degree > 1 or fence.ask.alone:
        return -1
    if rules.warmup.enabled and now + rules.warmup.settle_s > fence.start_at:
        return -1
    holders, room_mib = view.after(fence.start_at)
    if not _may_join(holders, rules, policy, 2):
        return -1
    return room_mib - rules.memory.margin_mib - fence.ask.memory_mib


def in_the_way(fence: Fence, newcomer: Holder, view: GpuView, policy: Policy) -> bool:
    """Whether the policy would have something against the first beside that newcomer, where memory allows both."""
    if policy.against is None or fence.start_at is None or newcomer.ends_at <= fence.start_at:
        return False
    staying, _ = view.after(fence.start_at)
    return policy.opposes(_later(fence.ask, fence.start_at, policy), (*staying, newcomer))


def _later(ask: Ask, at: float, policy: Policy) -> Ask:
    return ask if policy.against is None else replace(ask, at=at)
