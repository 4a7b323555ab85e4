"""The GPUs' doors, looked at again only where something has changed, or where the time has come at which they change by
themselves. And whether a pass in which nobody could start would end the same way again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import inf

from msgspec.structs import replace

from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, GpuId, Placement
from carma.core.scheduling.decision import Ask
from carma.core.scheduling.feasibility import by_size, never_fits
from carma.core.scheduling.kept import Asked, Doors, Kept, Nobody
from carma.core.scheduling.news import EARLY_S
from carma.core.scheduling.policy import as_of
from carma.core.scheduling.reservation import Fence, degree_of, free_at
from carma.core.scheduling.scheduling_pass import ask_of
from carma.core.scheduling.snapshot import (
    blind_to,
    expected_end,
    expected_runtime_s,
    fresh_sample,
    later_view,
    same_until,
    stale_at,
    view_of,
    warm_until,
)
from carma.core.scheduling.verdicts import Door, at_the_gate, door_of, tasks_allowed
from carma.core.state import SERVER, State


def refreshed(state: State, now: float) -> Doors:
    """All doors as they are now."""
    doors = state.doors
    if doors.found is not state.gpus or doors.drained != state.drained:
        doors.begin(state.gpus, state.drained)
    if now < doors.now:  # the clock was set back
        doors.begin(state.gpus, state.drained)
    doors.now = now
    doors.awake(now)
    for gpu in doors.touched:
        kept = doors.by_gpu.get(gpu)
        if kept is not None:
            _look_again(state, doors, kept, now)
    doors.touched.clear()
    return doors


def _look_again(state: State, doors: Doors, kept: Kept, now: float) -> None:
    was_open, free_mib, taken, was = not kept.closed, kept.free_mib, kept.taken, kept.door
    kept.door = None
    kept.until_one_ends, kept.no_sooner = _full(state, state.on_gpu.get(kept.gpu.id)), None
    kept.until = inf if kept.until_one_ends else _closed_until(state, kept.gpu.id)
    closed, same = kept.until > now, False
    if not closed and _too_busy(state, kept.gpu.id, now):
        closed, kept.until = True, stale_at(state, fresh_sample(state, state.live_of(kept.gpu.id), now))
        kept.until_one_ends = True
    elif not closed:
        door = _same_company(state, kept, door_at(state, kept, now), was)
        closed = door.shut is not None or door.busy is not None
        kept.free_mib, kept.taken = door.free_mib, door.taken is not None
        kept.until = stale_at(state, door.view.newest)
        same = was is not None and door.view.holders is was.view.holders and _as_free(door, was)
    if not same or closed == was_open or kept.free_mib > free_mib:
        doors.version += 1
        kept.version = doors.version
    if not same:
        kept.free_for = None
    doors.wake(kept)
    if closed and was_open:
        doors.shut(kept)
    elif not closed and not was_open:
        doors.opened(kept)
    nobody = doors.nobody
    if nobody is None:
        return
    wider = not was_open or kept.free_mib > free_mib or (taken and not kept.taken)
    may_start = not closed and wider and kept.free_mib >= nobody.smallest_mib
    if may_start or (nobody.fence is not None and not _still_fenced(state, nobody, nobody.fence, kept, now)):
        doors.nobody = None


def _same_company(state: State, kept: Kept, door: Door, was: Door | None) -> Door:
    """The very holders of before, where nothing can be told of them that was not known: what was worked out for them
    still holds."""
    if state.policy.against is None or was is None or door.view.holders != was.view.holders:
        return door
    kept.door = replace(door, view=replace(door.view, holders=was.view.holders))
    return kept.door


def _as_free(door: Door, was: Door) -> bool:
    """Whether nothing has changed that `free_at` looks at, among the same holders."""
    view, before = door.view, was.view
    return (
        (door.shut, door.busy, door.free_mib) == (was.shut, was.busy, was.free_mib)
        and (view.outdated, view.used_mib, view.foreign_mib) == (before.outdated, before.used_mib, before.foreign_mib)
        and (view.fault, view.drained) == (before.fault, before.drained)
    )


def _closed_until(state: State, gpu: GpuId) -> float:
    """Most doors are closed for a reason that is told without a look at figures; -inf where none is. Not of one that
    is full."""
    if gpu in state.drained or SERVER in state.drained:
        return inf
    holders = state.on_gpu.get(gpu)
    if not holders:
        return -inf
    rules, latest = state.rules, -inf
    if rules.warmup.enabled:
        for key in holders:
            track = state.tracks.get(key)
            seen = track.on.get(gpu) if track is not None else None
            latest = max(latest, warm_until(seen, state.tasks[key.task], rules))
    return latest


def _full(state: State, holders: Mapping[AttemptKey, Placement] | None) -> bool:
    """Whether nobody more may come, however much room there is, before one of those has left."""
    if not holders:
        return False
    if not state.policy.shares or len(holders) >= tasks_allowed(state.rules):
        return True
    return True in [placement.booking.alone for placement in holders.values()]


def _too_busy(state: State, gpu: GpuId, now: float) -> bool:
    """Whether the gate keeps it closed to everybody, which is told without a look at who is there. Where a policy looks
    at company itself, what is known of that is kept, and the whole door is looked at."""
    policy = state.policy
    if not policy.gated or policy.against is not None or not state.on_gpu.get(gpu):
        return False
    live = state.live_of(gpu)
    newest = fresh_sample(state, live, now)
    if newest is not None and newest.processes is None:
        return False  # it takes more to tell whether that is outdated
    return at_the_gate(blind_to(state, live, newest), live.window.gauges(live.since), state.rules) is not None


def door_at(state: State, kept: Kept, now: float) -> Door:
    """With every figure as of now."""
    door = kept.door
    if door is not None and (kept.at == now or kept.at <= now < kept.same_until):
        return door
    if door is not None and kept.at <= now < kept.told_until:  # it is only later than it was
        view = later_view(state, door.view, now)
        kept.door = door = replace(door, view=view)
    else:
        view = view_of(state, kept.gpu, now)
        kept.door = door = door_of(view, state.rules, state.policy)
        times_told = door.shut is None and door.busy is not None and door.busy.code == "WarmUp"
        kept.told_until = now if times_told else stale_at(state, view.newest)
    kept.at, kept.same_until = now, same_until(state, view, now)
    return door


def door_told(state: State, kept: Kept, now: float) -> Door:
    """With its sentences as of now; when its holders should settle or end may be as of before."""
    if kept.door is not None and kept.at <= now < kept.told_until:
        return kept.door
    return door_at(state, kept, now)


def asked_by(state: State, doors: Doors, task: Task) -> Asked:
    known = doors.asked.get(task.id)
    if known is None:
        spec, sizes = task.spec, by_size(state)
        plain = spec.begin_at is None and not spec.after and spec.array is None
        plain = plain and never_fits(state, spec, sizes) is None and not state.accounts.limited
        ask, runtime_s = ask_of(task, state, sizes), expected_runtime_s(task, state.rules)
        known = Asked(task, ask, runtime_s, plain, doors.number_of(ask, runtime_s))
        doors.asked[task.id] = known
    return known


def free_for(state: State, kept: Kept, ask: Ask, now: float) -> float:
    """When the GPU could take it (reserve.py); inf: never, as things stand."""
    at = free_at(ask, door_at(state, kept, now), state.rules, state.policy, now)
    kept.free_for = (_wants(ask), inf if at is None else at)
    return kept.free_for[1]


def _wants(ask: Ask) -> tuple[object, ...]:
    """All of an ask that its start depends on. What a policy has against company may cease by itself: `at` is of the
    span for which it was asked."""
    return (ask.memory_mib, ask.alone, ask.demand, ask.alone_s, ask.gpus, ask.at)


def reserved(state: State, ask: Ask, found: Sequence[Kept], now: float) -> Fence:
    """What `reserve` answers. As long as nothing happens to a GPU, it never becomes free earlier than was once worked
    out: only those whose turn it may be are looked at again."""
    degree = degree_of(state.overtaken.get(ask.task, 0), state.rules)
    waiting: list[tuple[float, int, int]] = []
    for place, kept in enumerate(found):
        at = _not_before(state, kept, ask, now, roughly=degree < 3)
        if at < inf:
            waiting.append((at, kept.gpu.index, place))
    could = {found[place].gpu.id for _, _, place in waiting} if degree == 3 else set()
    heapify(waiting)
    chosen: set[GpuId] = set()
    start_at = now
    while waiting and waiting[0][0] < inf and len(chosen) < ask.gpus:
        at, index, place = waiting[0]
        now_at = free_for(state, found[place], ask, now)
        if now_at == at:
            start_at = at
            chosen.add(found[place].gpu.id)
            heappop(waiting)
        else:
            heapreplace(waiting, (now_at, index, place))
    if len(chosen) < ask.gpus:
        return Fence(ask=ask, gpus=frozenset(), start_at=None, degree=degree)
    return Fence(ask=ask, gpus=frozenset(could or chosen), start_at=start_at, degree=degree)


def _not_before(state: State, kept: Kept, ask: Ask, now: float, *, roughly: bool) -> float:
    """When the GPU could take it, or earlier; inf where it never could, which is always of now. `roughly`: it may also
    be finite where it never could."""
    known = kept.free_for
    live = state.live.get(kept.gpu.id)
    if known is None or known[0] != _wants(ask) or live is None:
        if roughly and kept.until_one_ends and kept.door is None:
            return _no_sooner(state, kept, now)
        return free_for(state, kept, ask, now)
    if known[1] < inf and now >= stale_at(state, live.window.newest):
        return free_for(state, kept, ask, now)
    return known[1]


def _no_sooner(state: State, kept: Kept, now: float) -> float:
    """Of a GPU that is full, or too busy: it is free for nobody before one of its tasks should end, or a sample tells
    that it is less busy than was thought (`free_at`). That is told without a look at all that is known of them."""
    if kept.no_sooner is None:
        at = now + state.rules.window.stale_s
        for key in state.on_gpu[kept.gpu.id]:
            at = min(at, expected_end(state.tasks[key.task], state.tracks.get(key), state.rules, now))
        kept.no_sooner = at
    return kept.no_sooner


# Whether another pass is worth while.


def still_nobody(state: State, doors: Doors, now: float) -> bool:
    """Whether the last pass, in which nobody could start, would end the same way now."""
    nobody = doors.nobody
    if nobody is None or not nobody.at <= now < nobody.until:
        doors.nobody = None
        return False
    if nobody.as_of is not None and nobody.as_of != (doors.version, as_of(now)):
        doors.nobody = None
        return False
    if nobody.arrived:
        for turn in sorted(nobody.arrived):
            asked = asked_by(state, doors, state.tasks[turn[2]])
            if not asked.plain or sum(kept.lets_in(asked.ask) for kept in doors.open) >= asked.ask.gpus:
                doors.nobody = None
                return False
            nobody.smallest_mib = min(nobody.smallest_mib, asked.ask.memory_mib)
            nobody.behind += 1
            nobody.last = turn
        nobody.arrived.clear()
        nobody.full = nobody.behind >= state.rules.queue.backfill_depth
    return True


def fence_holds(state: State, doors: Doors, nobody: Nobody, fence: Fence, now: float) -> None:
    """How long the fence that kept somebody out stays as it is if nothing happens.

    No GPU's `free_at` becomes earlier by itself, so those that are kept are the earliest as long as their own times
    stay. And as long as they do, who was kept out is kept out: the start comes nearer, and others end only later. In
    the third degree times do not matter: every GPU that could hold the first one is kept, as long as enough of them
    can be named.
    """
    nobody.fence = fence
    if fence.degree == 3:
        seen = (state.live_of(gpu).window.newest for gpu in fence.gpus)
        nobody.until = min(nobody.until, sorted(stale_at(state, newest) for newest in seen)[-fence.ask.gpus])
        return
    for gpu in fence.gpus:
        kept = doors.by_gpu[gpu]
        door = door_at(state, kept, now)
        at = free_at(fence.ask, door, state.rules, state.policy, now)
        nobody.last_free = max(nobody.last_free, (inf if at is None else at, kept.gpu.index))
        if door.refuse(fence.ask) is not None:  # else it could have that one at any time
            nobody.until = min(nobody.until, _free_then_until(state, kept, fence.ask, at, now))


def _free_then_until(state: State, kept: Kept, ask: Ask, at: float | None, now: float) -> float:
    """So long `free_at` stays the same. It never falls: if it is the same later, then it is so all the time between."""
    door = door_at(state, kept, now)
    if at is None or door.view.outdated:
        return now
    for then in (min(at, stale_at(state, door.view.newest)) - EARLY_S, kept.same_until):
        if now < then <= at:
            later = door_of(view_of(state, kept.gpu, then), state.rules, state.policy)
            if free_at(ask, later, state.rules, state.policy, then) == at:
                return then
    return now


def _still_fenced(state: State, nobody: Nobody, fence: Fence, kept: Kept, now: float) -> bool:
    """Whether the fence is the same after something has changed on one GPU."""
    among = kept.gpu.id in fence.gpus
    if among and fence.degree < 3:
        return False
    at = free_at(fence.ask, door_at(state, kept, now), state.rules, state.policy, now)
    if fence.degree == 3:
        return among == (at is not None)
    return at is None or (at, kept.gpu.index) > nobody.last_free
