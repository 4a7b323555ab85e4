"""Which running tasks are slowed down beyond the limit beside their neighbours, and since when.

The limit is `placement.slowdown_limit`, but at least the cap: what a policy accepts in a bad case is no harm. As in the
policy's forecast it is a limit on the whole run: a task of known run time may be slower for a while. A slowdown that is
inferred from activity counts only where the activity contradicts the prediction.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, GpuId, TaskId
from carma.core.scheduling.forecast import CLEARLY_LESS
from carma.core.state import EARLY_S, State
from carma.core.telemetry.measurements import Track
from carma.core.telemetry.step_rates import Slowdown, slowdown

UNTESTED_S = 600.0  # for which a slowdown that no pause has confirmed keeps others away


class Slowed(NamedTuple):
    task: TaskId
    value: float  # time taken / time alone, now
    since: float
    inferred: bool


def limit(state: State) -> float:
    rules = state.rules.placement
    return max(rules.slowdown_cap, rules.slowdown_limit)


def observe(state: State) -> None:
    """Called after each sample and each count of steps."""
    if not state.rules.undo.enabled:
        return
    for key, track in state.tracks.items():
        if (_beyond(state, key, track) is None) == (track.slowed_since is None):
            continue
        track.slowed_since = state.now if track.slowed_since is None else None
        for gpu in track.on:
            state.touch(gpu)


def _beyond(state: State, key: AttemptKey, track: Track) -> Slowdown | None:
    """Its slowdown, if that is beyond the limit."""
    if all(len(state.on_gpu.get(gpu, ())) < 2 for gpu in track.on):
        return None
    task = state.tasks[key.task]
    found = slowdown(state, task, task.attempts[-1])
    if found is None or min(found.value, _of_the_run(state, key, track, found.value)) <= limit(state):
        return None
    ratio = min((state.live_of(gpu).activity_ratio for gpu in track.on), default=1.0)
    return None if found.inferred and ratio >= CLEARLY_LESS else found


def _of_the_run(state: State, key: AttemptKey, track: Track, value: float) -> float:
    """Slowdown of the whole run if it is that slow until its end, or until its neighbours should have ended."""
    if not track.alone_s:
        return value
    left_s = max(0.0, track.alone_s - track.done_by(state.now))
    slow_s = min(left_s, _together_s(state, key, track) / value)
    return (track.ran_s(state.now) + slow_s * value + left_s - slow_s) / track.alone_s


def _together_s(state: State, key: AttemptKey, track: Track) -> float:
    """Time until the last of its neighbours should have ended; infinite if the run time of one is not known."""
    others = {other for gpu in track.on for other in state.on_gpu.get(gpu, ()) if other != key}
    return max((_left_s(state.tracks.get(other), state.now) for other in others), default=0.0)


def _left_s(track: Track | None, now: float) -> float:
    if track is None or not track.alone_s:
        return inf
    return max(0.0, track.alone_s - track.done_by(now)) / track.rate


def slowed_on(state: State, gpu: GpuId, now: float) -> Slowed | None:
    """The task on the GPU that was slowed down first, for `undo.after_s` now. One that was not faster while a neighbour
    was paused does not count, and one without such a test not for ever: its steps are its user's figures."""
    found = [one for key in state.on_gpu.get(gpu, ()) if (one := _slowed(state, key, now)) is not None]
    return min(found, key=lambda one: (one.since, one.task), default=None)


def _slowed(state: State, key: AttemptKey, now: float) -> Slowed | None:
    track, task = state.tracks.get(key), state.tasks[key.task]
    if track is None or track.slowed_since is None:
        return None
    begins_at, ends_at = _effective(state, task, track.slowed_since)
    found = _beyond(state, key, track)
    if found is None or not begins_at - EARLY_S <= now < ends_at:
        return None
    return Slowed(key.task, found.value, track.slowed_since, found.inferred)


def _effective(state: State, task: Task, since: float) -> tuple[float, float]:
    """From when until when a slowdown has consequences."""
    rules, relief = state.rules.undo, task.relief
    if relief is not None and relief.refuted:
        return inf, inf
    begins_at = since + rules.after_s
    return begins_at, inf if relief is not None and relief.confirmed else begins_at + UNTESTED_S


def changes_at(state: State, gpu: GpuId, now: float) -> float:
    """When the answer of `slowed_on` may change by time alone."""
    times = [
        at
        for key in state.on_gpu.get(gpu, ())
        if (track := state.tracks.get(key)) is not None and track.slowed_since is not None
        for at in _effective(state, state.tasks[key.task], track.slowed_since)
    ]
    return min((at for at in times if at - EARLY_S > now), default=inf)
