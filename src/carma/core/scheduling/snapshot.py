"""Builds the view of a GPU from the state, and tells how long that view stays valid.

The room of a GPU is the smaller of (capacity - counted memory - foreign memory) and (observed free memory - what tasks
may still grow). An attempt counts with its booking or with its observed peak, whichever is larger.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from carma.core.model.decision import RECOVERY, UNKNOWN
from carma.core.model.settings import Rules
from carma.core.model.status import Running, Starting
from carma.core.model.task import Task
from carma.core.model.units import show_s
from carma.core.model.values import AttemptKey, Booking, Confinement, Gpu, GpuId, GpuSample, ProcessUse
from carma.core.scheduling.gpu_view import MAX_JOINT_GPUS, EndDoubt, GpuView, Holder, OtherGpu, Progress, room_mib
from carma.core.state import EARLY_S, SERVER, State
from carma.core.telemetry.measurements import HIDDEN_MIB, AttemptOnGpu, Live, Track
from carma.core.telemetry.pace import belief, correction_of, observed_of_command
from carma.core.telemetry.slowed import changes_at, limit, slowed_on


def views(state: State, now: float) -> tuple[GpuView, ...]:
    """Every GPU, in index order."""
    ordered = sorted(state.gpus.values(), key=lambda gpu: gpu.index)
    return tuple(view_of(state, gpu, now) for gpu in ordered)


def view_of(state: State, gpu: Gpu, now: float) -> GpuView:
    live = state.live.get(gpu.id) or Live(state.rules.window.length_s)
    newest = _fresh_sample(state, live, now)
    look = live.newest_memory if newest is not None else None  # of memory, which is sampled more often than the rest
    holders = tuple([_holder(state, gpu, live, key, now) for key in state.on_gpu.get(gpu.id, ())])
    gone_mib = left_mib(state, look)
    outdated = look is not None and look.processes is None and look.at <= live.left_at
    used = None
    if look is not None and look.memory_used_mib is not None and not outdated:
        used = max(0, look.memory_used_mib - gone_mib)
    foreign, foreign_mib = _foreign(state, look, holders, used)
    return GpuView(
        gpu=gpu,
        holders=holders,
        newest=newest,
        foreign=foreign,
        foreign_mib=foreign_mib,
        used_mib=used,
        booked_mib=sum([holder.counted_mib for holder in holders]),
        room_mib=room_mib(gpu.memory_mib, used, foreign_mib, holders),
        summaries=live.window.gauges(live.since),
        blind="no sample since a task left" if outdated else _blind_to(state, live, newest),
        outdated=outdated,
        fault=newest.fault if newest is not None else None,
        slowed=_slowed(state, gpu.id, now),
        drained=state.drained.get(gpu.id) or state.drained.get(SERVER, state.drained.get(gpu.id)),
    )


def _slowed(state: State, gpu: GpuId, now: float) -> str | None:
    """Why sharing on this GPU is being undone; None if it is not."""
    pauses = (state.tasks[key.task].paused for key in state.on_gpu.get(gpu, ()))
    relieved = next((one.slowed for one in pauses if one is not None and one.slowed is not None), None)
    if relieved is not None:
        return f"a task is paused for task {relieved}, which was too slow beside it"
    found = slowed_on(state, gpu, now)
    if found is None:
        return None
    how = ", inferred from activity" if found.inferred else ""
    return f"task {found.task} takes {found.value:.2f} times as long as alone there (limit {limit(state):g}{how})"


def _fresh_sample(state: State, live: Live, now: float) -> GpuSample | None:
    """The newest sample, unless it is too old."""
    newest = live.window.newest
    return None if newest is None or newest.at < now - state.rules.window.stale_s else newest


def _left_since(state: State, key: AttemptKey, sample_at: float) -> bool:
    """Whether an attempt in the sample has ended since then: its process and its memory are gone."""
    task = state.tasks.get(key.task)
    if task is None or not 0 < key.attempt <= len(task.attempts):
        return False
    ended_at = task.attempts[key.attempt - 1].ended_at
    return ended_at is not None and ended_at >= sample_at


def left_mib(state: State, newest: GpuSample | None) -> int:
    """Memory in the sample of attempts that have ended since then."""
    gone_mib = 0
    if newest is not None:
        for use in newest.processes or ():
            if use.attempt is not None and _left_since(state, use.attempt, newest.at):
                gone_mib += use.memory_mib or 0
    return gone_mib


def _foreign(
    state: State, newest: GpuSample | None, holders: tuple[Holder, ...], used_mib: int | None
) -> tuple[tuple[ProcessUse, ...], int]:
    """Processes that CARMA did not start, and their memory.

    Memory beyond that of the listed processes is foreign too: an empty process list does not make a GPU idle.
    """
    if newest is None or used_mib is None:
        return (), 0
    held = {holder.key for holder in holders}
    foreign: list[ProcessUse] = []
    listed_mib = 0
    for use in newest.processes or ():
        if use.attempt is not None and (use.attempt in held or _left_since(state, use.attempt, newest.at)):
            listed_mib += (use.memory_mib or 0) if use.attempt in held else 0
        else:
            foreign.append(use)
    foreign_mib = sum([use.memory_mib or 0 for use in foreign])
    unseen_mib = sum([holder.counted_mib for holder in holders if holder.observed_mib is None])
    hidden_mib = used_mib - listed_mib - foreign_mib - unseen_mib
    return tuple(foreign), foreign_mib + (hidden_mib if hidden_mib > HIDDEN_MIB else 0)


def _blind_to(state: State, live: Live, newest: GpuSample | None) -> str | None:
    """Why the window of a GPU cannot be judged; `newest` is its newest fresh sample."""
    if newest is None:
        return f"no sample in the last {show_s(state.rules.window.stale_s)}"
    samples = live.window.count_since(live.since)
    if samples < state.rules.window.min_samples:
        return f"{samples} of {state.rules.window.min_samples} samples since a task came or left"
    return None


def _holder(state: State, gpu: Gpu, live: Live, key: AttemptKey, now: float) -> Holder:
    task = state.tasks[key.task]
    placement = state.on_gpu[gpu.id][key]
    track = state.tracks.get(key)
    seen = track.on.get(gpu.id) if track is not None else None
    warm_up = warming_up(seen, task, state.rules, now)
    bounded = memory_is_bounded(placement.booking, task.attempts[-1].confinement)
    ends_at, end_doubt = expected_end(task, track, state.rules, now)
    demand = belief(task, seen)
    return Holder(
        key=key,
        booking_mib=placement.booking.memory_mib,
        observed_mib=seen.now_mib if seen is not None else None,
        peak_mib=track.peak_mib if track is not None else task.attempts[-1].observed_mib,
        alone=placement.booking.alone,
        warming=warm_up.phrase if warm_up is not None else None,
        settles_at=warm_up.until if warm_up is not None else None,
        closes=warm_up is not None and not bounded,
        ends_at=ends_at,
        end_doubt=end_doubt,
        demand=demand,
        correction=correction_of(state, task, demand),
        same_command=observed_of_command(state, task) if demand is None else None,
        progress=_progress(task, track, gpu.id, live.activity_ratio),
        other_gpus=_beside(state, key, gpu.id),
    )


def memory_is_bounded(booking: Booking, confinement: Confinement | None) -> bool:
    """Whether the memory of an attempt is known and a limit other than the watchdog holds it there, so that others may
    join it before it has settled. Before the attempt starts, its limits are taken to be those that it is to get."""
    if booking.cap_mib is None or booking.source in (UNKNOWN, RECOVERY):
        return False
    return confinement is None or any(guard.rung != "watchdog" for guard in confinement.guards)


def _beside(state: State, key: AttemptKey, gpu: GpuId) -> tuple[OtherGpu, ...]:
    """The attempt's other GPUs with their tasks: what a forecast needs, and no more. Only for policies that define
    `objection`, and not for tasks on so many GPUs that it would take too long."""
    gpus = state.on_gpu[gpu][key].gpus
    if not 1 < len(gpus) <= MAX_JOINT_GPUS or state.policy.objection is None:
        return ()
    task, track = state.tasks[key.task], state.tracks.get(key)
    found: list[OtherGpu] = []
    for other in gpus:
        if other != gpu:
            seen = track.on.get(other) if track is not None else None
            sharing = [_sharer(state, one, other) for one in state.on_gpu.get(other, ()) if one != key]
            found.append(OtherGpu(other, belief(task, seen), tuple(sharing)))
    return tuple(found)


def _sharer(state: State, key: AttemptKey, gpu: GpuId) -> Holder:
    task, track = state.tasks[key.task], state.tracks.get(key)
    demand = belief(task, track.on.get(gpu) if track is not None else None)
    return Holder(
        key=key,
        booking_mib=state.on_gpu[gpu][key].booking.memory_mib,
        ends_at=inf,
        demand=demand,
        correction=correction_of(state, task, demand),
        progress=_progress(task, track, gpu, 1.0),
    )


def _progress(task: Task, track: Track | None, gpu: GpuId, activity_ratio: float) -> Progress | None:
    alone_s = task.estimate.runtime_s if task.estimate is not None else None
    if track is None:
        return None
    if track.began_at is None:
        return not_begun(task.attempts[-1].placed_at, alone_s)
    elsewhere = min((rate for other, rate in track.rates.items() if other != gpu), default=1.0)
    rate = min(1.0, track.rate * activity_ratio)
    return Progress(track.began_at + track.paused_s, track.done_s, track.paced_at, rate, alone_s, elsewhere)


def not_begun(at: float, alone_s: float | None) -> Progress:
    return Progress(at, 0.0, at, 1.0, alone_s)


class WarmingUp(NamedTuple):
    """An attempt that has not settled on a GPU: a phrase, and when it should stop closing the GPU."""

    phrase: str
    until: float


def warming_up(seen: AttemptOnGpu | None, task: Task, rules: Rules, now: float) -> WarmingUp | None:
    """None once the attempt has settled on the GPU (see observe.py for what settles it). A pause does not count."""
    if task.paused is not None:
        now = min(now, task.paused.at)
    until = warm_until(seen, task, rules)
    if now >= until:
        return None
    status = task.status
    if isinstance(status, Starting):
        phrase = f"was sent there {show_s(now - status.since)} ago and has not started yet"
        return WarmingUp(phrase, now + rules.warmup.idle_s)
    assert isinstance(status, Running)
    if seen is None or seen.first_at is None:
        started, left = show_s(now - status.since), show_s(until - now)
        return WarmingUp(
            f"started {started} ago and has not used the GPU yet; if it does not, the GPU opens to others in {left}",
            until,
        )
    return _settling(max(seen.first_at, seen.grown_at or seen.first_at), seen, rules, now, until)


def warm_until(seen: AttemptOnGpu | None, task: Task, rules: Rules) -> float:
    """When it no longer counts as warming up, if no sample shows a change until then."""
    if seen is not None and seen.settled_at is not None:
        return -inf
    status = task.status
    if isinstance(status, Starting):
        return inf
    assert isinstance(status, Running)
    since = status.since + task.attempts[-1].paused_s
    until = since + rules.warmup.limit_s
    if seen is None or seen.first_at is None:
        until = min(until, since + rules.warmup.idle_s)
    return until


def _settling(calm_since: float, seen: AttemptOnGpu, rules: Rules, now: float, until: float) -> WarmingUp:
    calm_s, wanted_s = now - calm_since, rules.warmup.settle_s
    if calm_s >= wanted_s:
        # Both halves of the span must be alike; if nothing changes, they are when it is twice as long.
        return WarmingUp("is warming up: its activity still changes", min(until, now + calm_s))
    until = min(until, calm_since + wanted_s)
    left = f"it must stay steady for {show_s(wanted_s)}, {show_s(until - now)} to go"
    return WarmingUp(f"is warming up: {_since(seen, calm_s)}; {left}", until)


def _since(seen: AttemptOnGpu, calm_s: float) -> str:
    if seen.grown_at is not None:
        return f"its memory grew {show_s(calm_s)} ago"
    if seen.adopted:
        return f"since the daemon's restart it has been seen on the GPU for {show_s(calm_s)}"
    return f"it first used the GPU {show_s(calm_s)} ago"


def _should_end(task: Task, track: Track | None, rules: Rules) -> float:
    """Expected end, from the progress if the run time alone is known; else from the assumed run time."""
    attempt = task.attempts[-1]
    alone_s = task.estimate.runtime_s if task.estimate is not None else None
    if alone_s is not None and track is not None and track.began_at is not None:
        return track.paced_at + max(0.0, alone_s - track.done_s) / track.rate
    start = attempt.started_at if attempt.started_at is not None else attempt.placed_at
    return start + attempt.paused_s + expected_runtime_s(task, rules)


def expected_end(task: Task, track: Track | None, rules: Rules, now: float) -> tuple[float, EndDoubt | None]:
    """Expected end, at most at the time limit. A task that overran it is expected to run half its time so far more."""
    attempt = task.attempts[-1]
    start = attempt.started_at if attempt.started_at is not None else attempt.placed_at
    still_s = 0.0 if task.paused is None else max(now, task.paused.until or now) - task.paused.at
    end, doubt = _should_end(task, track, rules) + still_s, end_doubt(task)
    if task.paused is not None and task.paused.until is None and doubt is None:
        doubt = "assumed"  # as if its user continued it now
    if end <= now:
        end = now + max(1.0, 0.5 * (now - start))
        doubt = "estimate_over" if doubt is None else "assumed_over"
    limit_at = inf if task.spec.time_limit_s is None else start + attempt.paused_s + still_s + task.spec.time_limit_s
    certain = min(limit_at, _leaves_at(task))
    return (max(certain, now), doubt if still_s else None) if certain <= end else (end, doubt)


def end_doubt(task: Task) -> EndDoubt | None:
    """Why the end of a task that starts now is uncertain; None if it is certain."""
    known = task.spec.time_limit_s is not None or (task.estimate is not None and task.estimate.runtime_s is not None)
    return None if known else "assumed"


def _leaves_at(task: Task) -> float:
    """The end of the grace period of a task that was asked to checkpoint."""
    asked = task.status.preempting if isinstance(task.status, Running) else None
    return inf if asked is None else asked.until


def same_until(state: State, view: GpuView, now: float) -> float:
    """Until when the view stays as it is if nothing happens to the GPU; `now` where it changes with every second."""
    # After that the newest sample may count as none.
    until = inf if view.newest is None else view.newest.at + state.rules.window.stale_s - EARLY_S
    until = min(until, changes_at(state, view.gpu.id, now))
    for holder in view.holders:
        task, track = state.tasks[holder.key.task], state.tracks.get(holder.key)
        if holder.warming is not None or task.paused is not None:
            return now
        until = min(until, _should_end(task, track, state.rules), _leaves_at(task))
    return until


def expected_runtime_s(task: Task, rules: Rules) -> float:
    """The estimated run time, else the assumed one; at most the time limit."""
    estimated = task.estimate.runtime_s if task.estimate is not None else None
    limit_s = task.spec.time_limit_s
    if limit_s is not None:
        return limit_s if estimated is None else min(estimated, limit_s)
    return rules.queue.assumed_runtime_s if estimated is None else estimated
