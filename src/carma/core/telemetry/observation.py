"""Observation of samples: memory peaks, and when an attempt has settled. Called by `machine.step` only.

An attempt has settled on a GPU when its memory has not grown for `settle_s` since its first use, and the GPU's SM
activity is similar in both halves of that time (published: 30 s from first activity predict the rest of a run to .0055;
a fixed wait from the launch does not, because start-up takes 8 to 55 s). attribution.py distributes activity and
energy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from carma.core.model.events import MemoryObserved
from carma.core.model.status import Running
from carma.core.model.task import Attempt
from carma.core.model.values import AttemptKey, GpuId, GpuSample, TaskId
from carma.core.state import State, in_order
from carma.core.telemetry import attribution, booking_shrink, idle, inferred_activity, pace, step_rates
from carma.core.telemetry.measurements import AttemptOnGpu, Live, Member
from carma.core.telemetry.window import given

UNUSED_S = 10.0  # run time without any use of the GPU after which an attempt counts as not using it


def take(state: State, sample: GpuSample) -> None:
    """One sample of one GPU. A sample that is not newer than the last one is ignored."""
    gpu, at = sample.gpu, sample.at
    if gpu not in state.gpus:
        return
    live = state.live_of(gpu)
    before = live.window.newest
    if before is not None and at <= before.at:
        return
    sample = inferred_activity.completed(sample, state.gpus[gpu], attribution.idle_w_of(state, live, gpu))
    live.window.add(sample)
    newest = live.newest_memory is None or at > live.newest_memory.at  # a newer memory sample may have come first
    again = live.newest_memory is before and before is not None and _same_processes(live, before, sample)
    if newest:
        _set_newest_memory(state, live, sample)
    state.touch(gpu)
    if sample.processes is not live.held_of:  # otherwise the identical list
        live.held, live.held_of = memory_by_attempt(sample), sample.processes
    holders = _tracked(state, live, gpu)
    if not again:
        live.newest_members = None
        _observe_memory_of_all(state, live, holders, before, sample, newest)
    _note_unused(state, holders, sample)
    for member in holders:
        if member.track.pause_began_at is None and _settled(state, member.seen, live, sample):
            member.seen.settled_at = at
    if sample.fault is None:
        members = live.newest_members or attribution.members_of(state, holders, live.held, sample)
        if newest and sample.processes is not None:
            live.newest_members = members
        attribution.share_out(state, live, members, before, sample)
        idle.observe(members, before, sample, state.rules.window.stale_s)
    _update_due(state, gpu, holders)


def _same_processes(live: Live, before: GpuSample, sample: GpuSample) -> bool:
    """Whether the sample has the identical process list as the previous one and no attempt came or left since then."""
    return (
        live.members is not None
        and sample.processes is not None
        and sample.processes is before.processes
        and sample.memory_used_mib == before.memory_used_mib
    )


def _observe_memory_of_all(
    state: State, live: Live, holders: list[Member], before: GpuSample | None, sample: GpuSample, newest: bool
) -> None:
    at, held = sample.at, live.held
    for member in holders:
        key, seen = member.key, member.seen
        memory_mib = None if sample.processes is None else held.get(key, 0)
        if seen.first_at is None and key in held and memory_mib != 0:
            seen.first_at = at
            live.since = before.at if before is not None else 0.0  # this sample is the first one that shows it
        _observe_memory(state, member, at, memory_mib, newest)


def _note_unused(state: State, holders: list[Member], sample: GpuSample) -> None:
    """Attempts that have run for UNUSED_S without using the GPU, as far as the driver lists processes. Until then an
    attempt counts as using it: it may have begun since the previous sample."""
    changed = False
    for member in holders:
        seen = member.seen
        idle = seen.first_at is None and member.track.ran_s(sample.at) >= UNUSED_S
        unused = idle and sample.processes is not None
        changed, seen.unused = changed or unused != seen.unused, unused
    if changed and len(holders) > 1:
        pace.regroup(state, (sample.gpu,), sample.at)


def membership_changed(state: State, gpus: Collection[GpuId], at: float) -> None:
    """An attempt came to these GPUs or left them, or was paused or continued: older samples and rates show another
    group."""
    for gpu in gpus:
        state.live_of(gpu).since = at
    step_rates.neighbours_changed(state, gpus)
    pace.regroup(state, gpus, at)


def take_memory(state: State, sample: GpuSample) -> None:
    """A memory sample of one GPU. It has no activity, so it does not enter the window."""
    live = state.live.get(sample.gpu)
    if live is None or sample.fault is not None or sample.processes is None or sample.memory_used_mib is None:
        return
    if live.newest_memory is not None and sample.at <= live.newest_memory.at:
        return
    _set_newest_memory(state, live, sample)
    state.touch(sample.gpu)
    held = memory_by_attempt(sample)
    for member in _tracked(state, live, sample.gpu):
        _observe_memory(state, member, sample.at, held.get(member.key, 0), True)
    _update_due(state, sample.gpu, _tracked(state, live, sample.gpu))


def _set_newest_memory(state: State, live: Live, sample: GpuSample) -> None:
    """Sets the sample and updates the index of tasks by GPUs that show their processes (`shown_on`)."""
    before, live.newest_memory = live.newest_memory, sample
    if before is not None and before.processes is sample.processes:
        return
    tasks = [use.attempt.task for use in sample.processes or () if use.attempt is not None]
    if tasks == live.shown:
        return
    for task_id in set(live.shown) - set(tasks):
        shown = state.shown_on[task_id] = state.shown_on[task_id] - {sample.gpu}
        if not shown:
            del state.shown_on[task_id]
    for task_id in tasks:
        state.shown_on.setdefault(task_id, set()).add(sample.gpu)
    live.shown = tasks


def _update_due(state: State, gpu: GpuId, members: list[Member]) -> None:
    """Update the indices of what `propose` has to check after a sample of this GPU."""
    for member in members:
        task_id = member.key.task
        idle.check(state, task_id)
        if task_id in state.grown and memory_growth(state, task_id, state.now) is None:
            state.grown.discard(task_id)
        if member.track.shrinks and member.seen.settled_at is not None:
            booking_shrink.check(state, task_id)
        else:
            state.settled.discard(task_id)
    if len(members) > 1 and any(over_booking(state, gpu, member.key) for member in members):
        state.over_booking.add(gpu)
    else:
        state.over_booking.discard(gpu)


def _tracked(state: State, live: Live, gpu: GpuId) -> list[Member]:
    if live.members is not None:
        return live.members
    found: list[Member] = []
    for key in state.on_gpu.get(gpu, ()):
        track = state.tracks.get(key)
        seen = track.on.get(gpu) if track is not None else None
        if track is not None and seen is not None:
            found.append(Member(key, track, seen))
    live.members = found
    return found


def memory_by_attempt(sample: GpuSample) -> dict[AttemptKey, int | None]:
    """MiB of each attempt on the GPU; None if the memory of one of its processes is unknown."""
    held: dict[AttemptKey, int | None] = {}
    for use in sample.processes or ():
        if use.attempt is not None:
            before = held.get(use.attempt, 0)
            held[use.attempt] = None if before is None or use.memory_mib is None else before + use.memory_mib
    return held


def _observe_memory(state: State, member: Member, at: float, memory_mib: int | None, newest: bool) -> None:
    track, seen = member.track, member.seen
    if newest:
        seen.now_mib = memory_mib
    if not memory_mib:
        return
    if track.peak_mib is None or memory_mib > track.peak_mib:
        track.peak_mib = memory_mib
        state.grown.add(member.key.task)
        for gpu in track.on if len(track.on) > 1 else ():
            state.touch(gpu)
    if seen.first_at == at:
        seen.level_mib = memory_mib
    elif seen.first_at is not None and memory_mib > seen.level_mib + state.rules.warmup.growth_mib:
        seen.level_mib = memory_mib
        seen.grown_at = at


def _settled(state: State, seen: AttemptOnGpu, live: Live, sample: GpuSample) -> bool:
    """Whether the attempt settles with this sample."""
    if seen.settled_at is not None or seen.first_at is None:
        return False
    rules = state.rules.warmup
    calm_since = max(seen.first_at, seen.grown_at or seen.first_at)
    if sample.at - calm_since < rules.settle_s:
        return False
    return _steady(live, calm_since, sample.at, rules.activity_change)


def _steady(live: Live, since: float, until: float, change: float) -> bool:
    """Whether SM activity is similar in both halves. Without SM activity this passes, and the gate decides."""
    middle = (since + until) / 2
    early: list[float] = []
    late: list[float] = []
    for sample in live.window.samples:
        active = given(sample, "sm_active")
        if sample.at >= since and active is not None:
            (early if sample.at < middle else late).append(active)
    if not early or not late:
        return True
    return abs(sum(early) / len(early) - sum(late) / len(late)) <= change


def over_booking(state: State, gpu: GpuId, key: AttemptKey) -> bool:
    track = state.tracks.get(key)
    seen = track.on.get(gpu) if track is not None else None
    held = seen.now_mib if seen is not None else None
    return held is not None and held > state.on_gpu[gpu][key].booking.memory_mib


def to_watch(state: State) -> tuple[GpuId, ...]:
    """GPUs whose tasks could together use more memory than there is, because not all have a limit. Their memory is
    sampled several times per second."""
    if not state.rules.sharing.watchdog:
        return ()
    return tuple(gpu for gpu, held in state.on_gpu.items() if len(held) > 1 and _may_overflow(state, gpu))


def _may_overflow(state: State, gpu: GpuId) -> bool:
    most_mib = 0
    live = state.live.get(gpu)
    sample = None if live is None else live.newest_memory
    processes = Counter(use.attempt for use in (sample.processes or ())) if sample is not None else Counter()
    for key in state.on_gpu[gpu]:
        limit_mib = _limit_mib(state.tasks[key.task].attempts[-1], max(1, processes[key]))
        if limit_mib is None:
            return True
        most_mib += limit_mib
    return gpu in state.gpus and most_mib > state.gpus[gpu].memory_mib


def _limit_mib(attempt: Attempt, processes: int) -> int | None:
    """The memory limit of an attempt, other than the watchdog; None if there is none or it is unknown. All limits
    except those of cgroups apply per process."""
    guards = attempt.confinement.guards if attempt.confinement is not None else ()
    limits = (
        guard.limit_mib * (1 if guard.rung == "cgroup" else processes) for guard in guards if guard.rung != "watchdog"
    )
    return min(limits, default=None)


def to_store(state: State, now: float) -> list[MemoryObserved]:
    """Attempts whose memory grew by 64 MiB or 5 %. Other observations are stored with the use of GPUs (usage.py)."""
    found = (memory_growth(state, task_id, now) for task_id in in_order(state.grown, state.active))
    return [event for event in found if event is not None]


def memory_growth(state: State, task_id: TaskId, now: float) -> MemoryObserved | None:
    """The event for an active task; None if its memory has not grown enough since the last one."""
    task, key = state.tasks[task_id], state.active[task_id]
    track = state.tracks.get(key)
    if track is None or track.peak_mib is None or not isinstance(task.status, Running):
        return None
    known_mib = task.attempts[-1].observed_mib
    if known_mib is not None and track.peak_mib <= known_mib + max(64, known_mib // 20):
        return None
    return MemoryObserved(now, key, track.peak_mib, track.energy_j, track.activity, track.used_s)
