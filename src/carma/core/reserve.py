"""Keeps a large task from being starved: the first task that cannot start gets GPUs and a start time, and those behind
it may only go before it where they do not push that start back.

Three degrees. While few have overtaken it, later tasks may use its GPUs if they should be gone by its start or if it
still fits beside them. After `overtakes` of them its GPUs are kept for it alone. After twice as many, every GPU that
could ever hold it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carma.core.decision import Ask, Refusal
from carma.core.model import AttemptKey, GpuId, Record
from carma.core.placement import refuse
from carma.core.settings import Rules
from carma.core.units import show_s
from carma.core.view import GpuView, Holder


class Fence(Record, frozen=True, kw_only=True):
    ask: Ask
    gpus: tuple[GpuId, ...]
    start_at: float | None  # None: no GPU can be named (drained, lost, ...)
    degree: int  # 1: not delayed, 2: its GPUs kept, 3: every GPU that could hold it kept


def reserve(ask: Ask, views: Sequence[GpuView], rules: Rules, shares: bool, overtaken: int, now: float) -> Fence:
    """The GPUs on which the task should be able to start first, by what the running tasks are expected to take."""
    degree = 1 + (overtaken >= rules.queue.overtakes) + (overtaken >= 2 * max(1, rules.queue.overtakes))
    times = sorted(
        (at, view.gpu.index, view.gpu.id)
        for view in views
        if (at := free_at(ask, view, rules, shares, now)) is not None
    )
    if len(times) < ask.gpus:
        return Fence(ask=ask, gpus=(), start_at=None, degree=degree)
    chosen = times[: ask.gpus] if degree < 3 else times
    return Fence(ask=ask, gpus=tuple(gpu for _, _, gpu in chosen), start_at=times[ask.gpus - 1][0], degree=degree)


def free_at(ask: Ask, view: GpuView, rules: Rules, shares: bool, now: float) -> float | None:
    """When the GPU could take it, holders leaving as expected; None if it never could as things stand."""
    refusal = refuse(ask, view, rules, shares)
    if refusal is None:
        return now
    if view.fault is not None or view.drained is not None or view.room_mib is None or refusal.code == "NotListed":
        return None
    if refusal.code == "WarmUp":
        return now + rules.warmup.settle_s
    for at in sorted({holder.ends_at for holder in view.holders}):
        if _fits(ask, view.without_those_ending_by(at), rules, shares):
            return at
    return None


def _fits(ask: Ask, view: GpuView, rules: Rules, shares: bool) -> bool:
    if not view.holders:
        return ask.memory_mib <= (view.room_mib or 0)
    if ask.alone or not shares or any(holder.alone for holder in view.holders):
        return False
    if len(view.holders) >= rules.placement.tasks_per_gpu:
        return False
    return ask.memory_mib <= (view.room_mib or 0) - rules.memory.margin_mib


def keeper(
    fence: Fence, ask: Ask, runtime_s: float, rules: Rules, shares: bool, now: float
) -> Callable[[GpuView], Refusal | None]:
    """The extra filter for a task behind the fence."""

    def check(view: GpuView) -> Refusal | None:
        if view.gpu.id not in fence.gpus or fence.start_at is None:
            return None
        if fence.degree == 1 and not _delays(fence, ask, view, now + runtime_s, rules, shares):
            return None
        wait = show_s(max(0.0, fence.start_at - now))
        return Refusal("Reserved", f"is reserved for task {fence.ask.task}, which should start in {wait}")

    return check


def _delays(fence: Fence, ask: Ask, view: GpuView, ends_at: float, rules: Rules, shares: bool) -> bool:
    assert fence.start_at is not None
    if ends_at <= fence.start_at:
        return False
    newcomer = Holder(key=AttemptKey(ask.task, 0), booking_mib=ask.memory_mib, alone=ask.alone, ends_at=ends_at)
    return not _fits(fence.ask, view.joined_by(newcomer).without_those_ending_by(fence.start_at), rules, shares)
