"""Optimizer steps per second of each running attempt, and its slowdown as measured by them.

1. `take` follows the counts of an observation.
2. `neighbours_changed` begins a new window: a rate holds for the neighbours with which it was measured.
3. A rate beside neighbours that have all settled corrects the predicted rates of the command (rate_correction.py).
4. `slowdown` compares the rate with that of the same command alone: of this attempt if it was alone for long enough,
   else of an earlier one, as history knows it. Without counted steps it is inferred from activity (pace.py).

The duration of a step is a median over the window, weighted by steps, so that an evaluation or a checkpoint between two
steps does not count as slowness. After a longer pause the rate is unknown, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from carma.core.model.events import StepsCounted
from carma.core.model.task import Attempt, Task
from carma.core.model.values import AttemptKey, Correction, GpuId, StepProgress
from carma.core.scheduling.rate_correction import observed, unobserved
from carma.core.scheduling.sharing_model import mechanism_of, progress_rates
from carma.core.state import State
from carma.core.telemetry.measurements import StepPoint, StepRecord, Track
from carma.core.telemetry.pace import LEAST_RATIO, belief, command_of, independent_demand, regroup

LEAST_S, LEAST_STEPS = 5.0, 4  # observed before there is a rate
PAUSE_FACTOR = 5.0  # a step that takes longer than this many median steps contains a pause
PAUSE_INTERVALS = 2.0  # without a newer count for this many times the interval between the last two
LEARN_S = 10.0  # beside the same settled neighbours before a correction is learned
LEARNT_COMMANDS = 256  # of each user, of which corrections are kept
DIGITS = 4  # significant ones of a stored rate


class Slowdown(NamedTuple):
    """Time taken / time alone. `inferred`: from activity, not from steps."""

    value: float
    inferred: bool


def take(state: State, event: StepsCounted) -> None:
    for seen in event.counts:
        track = state.tracks.get(seen.key)
        if track is not None:
            _follow(state, seen.key, track, StepPoint(seen.last_at, seen.steps))


def _follow(state: State, key: AttemptKey, track: Track, point: StepPoint) -> None:
    record = track.step_record
    if record.newest is None or point.steps < record.newest.steps:
        record.points.clear()
    elif point.steps == record.newest.steps:
        return
    elif point.at <= record.newest.at:  # the last steps of a process, whose time is not known
        record.newest = StepPoint(record.newest.at, point.steps)
        return
    elif record.points:  # else the first one with these neighbours
        _count(record, point)
    record.points.append(point)
    record.newest = point
    _forget_old(record, state.rules.window.length_s)
    record.per_s = _rate(list(record.points))
    if record.per_s is not None and _settled_alone(state, key, track):
        record.alone_per_s = record.per_s
    else:
        _learn_beside(state, key, track, point)


def _count(record: StepRecord, point: StepPoint) -> None:
    """Steps and their time over the whole attempt, without pauses."""
    assert record.newest is not None
    steps, seconds = point.steps - record.newest.steps, point.at - record.newest.at
    if record.per_s is not None and seconds > PAUSE_FACTOR * steps / record.per_s:
        seconds = steps / record.per_s
    record.counted += steps
    record.counted_s += seconds


def _forget_old(record: StepRecord, length_s: float) -> None:
    """The window is longer than `length_s` if it would have too few steps."""
    points = record.points
    while len(points) > 2 and _enough(points[1], points[-1]) and points[-1].at - points[1].at >= length_s:
        points.popleft()


def _enough(first: StepPoint, last: StepPoint) -> bool:
    return last.steps - first.steps >= LEAST_STEPS and last.at - first.at >= LEAST_S


def _rate(points: Sequence[StepPoint]) -> float | None:
    if not points or not _enough(points[0], points[-1]):
        return None
    pairs = pairwise(points)
    spans = sorted(((b.at - a.at) / (b.steps - a.steps), b.steps - a.steps) for a, b in pairs)
    middle = (points[-1].steps - points[0].steps) / 2
    for step_s, steps in spans:
        middle -= steps
        if middle <= 0:
            return 1.0 / step_s
    return None


def _settled_alone(state: State, key: AttemptKey, track: Track) -> bool:
    """Without neighbours and foreign processes on its GPUs; where processes are not known, there may be some."""
    for gpu, seen in track.on.items():
        members = state.live_of(gpu).newest_members
        if seen.settled_at is None or len(state.on_gpu.get(gpu, ())) != 1 or members is None or members.foreign:
            return False
    return bool(track.on) and state.active.get(key.task) == key


def neighbours_changed(state: State, gpus: Iterable[GpuId]) -> None:
    for gpu in gpus:
        for key in state.on_gpu.get(gpu, ()):
            track = state.tracks.get(key)
            if track is not None:
                record = track.step_record
                record.per_s = record.together = None
                record.points.clear()  # a span with both groups would be neither's


# -- learning ---------------------------------------------------------------------------------------------------------


def _learn_beside(state: State, key: AttemptKey, track: Track, newest: StepPoint) -> None:
    """After LEARN_S beside the same settled neighbours, then whenever the time beside them has doubled: the error of a
    measurement changes slowly, so that more frequent ones would count for more than they tell."""
    record, predicted = track.step_record, _predicted_rate(state, key, track)
    if predicted is None or record.together is None:
        record.together = record.learned_until = newest if predicted is not None else None
        return
    first, until = record.together, record.learned_until or record.together
    if newest.at - first.at < max(LEARN_S, 2.0 * (until.at - first.at)):
        return
    task = state.tasks[key.task]
    per_s = _rate([point for point in record.points if point.at >= first.at])
    alone_per_s = alone_rate(task, task.attempts[-1], track)
    if per_s is not None and alone_per_s is not None and predicted < 1.0:
        record.learned_until = newest
        _correct(state, key, predicted, min(1.0, per_s / alone_per_s))


def _predicted_rate(state: State, key: AttemptKey, track: Track) -> float | None:
    """The rate that the sharing model says without corrections, if the tasks on its GPU are known and have settled."""
    if len(track.on) != 1 or state.active.get(key.task) != key:
        return None
    gpu = next(iter(track.on))
    held, members = list(state.on_gpu[gpu]), state.live_of(gpu).newest_members
    if len(held) < 2 or members is None or members.foreign:
        return None
    demands = []
    for one in held:
        seen = state.tracks[one].on[gpu] if one in state.tracks else None
        if seen is None or seen.settled_at is None or state.tasks[one.task].paused is not None:
            return None
        demand = independent_demand(state.tasks[one.task], seen)
        if demand is None:
            return None
        demands.append(demand)
    return progress_rates(demands, mechanism_of(state.rules))[held.index(key)]


def _correct(state: State, key: AttemptKey, predicted: float, measured: float) -> None:
    command = command_of(state.tasks[key.task])
    gpu = next(iter(state.tracks[key].on))
    beside = [command_of(state.tasks[one.task]) for one in state.on_gpu[gpu] if one != key]
    known = state.corrections.get(command) or unobserved(command)
    changed = {command: observed(known, beside, predicted, measured)}
    changed |= {name: unobserved(name) for name in beside if name not in state.corrections and name != command}
    for one in changed.values():
        _keep(state, one)
    state.new_corrections.update(changed)
    moved = [one for one in state.active.values() if command_of(state.tasks[one.task]) in changed]
    regroup(state, {gpu: None for one in moved if one in state.tracks for gpu in state.tracks[one].on}, state.now)


def _keep(state: State, one: Correction) -> None:
    """Of each user, the newest ones."""
    state.corrections.pop(one.command, None)
    state.corrections[one.command] = one
    user = one.command.partition(":")[0] + ":"
    for name in [name for name in state.corrections if name.startswith(user)][:-LEARNT_COMMANDS]:
        del state.corrections[name]
        state.new_corrections.discard(name)


def corrections_noted(state: State, stored: Iterable[Correction]) -> None:
    """The log has these now. Later observations of a running daemon stay."""
    for one in stored:
        if state.corrections.get(one.command) == one:
            state.new_corrections.discard(one.command)
        elif one.command not in state.new_corrections:
            _keep(state, one)


# -- reading ----------------------------------------------------------------------------------------------------------


def rate_now(state: State, track: Track, now: float) -> float | None:
    """Steps per second with the present neighbours; None if unknown, or if the training pauses."""
    record = track.step_record
    if record.per_s is None or record.newest is None:
        return None
    # A task whose writes are slow makes them rarely (launch/hook/sitecustomize.py).
    interval_s = record.points[-1].at - record.points[-2].at
    pause_s = max(state.rules.window.stale_s, PAUSE_FACTOR / record.per_s, PAUSE_INTERVALS * interval_s)
    return record.per_s if now - record.newest.at <= pause_s else None


def alone_rate(task: Task, attempt: Attempt, track: Track | None) -> float | None:
    """Steps per second of the same command alone. First the attempt's own rate, because a later attempt may have
    another; then that of the newest attempt."""
    if track is not None and track.step_record.alone_per_s is not None:
        return track.step_record.alone_per_s
    own = [one.progress for one in (attempt, *reversed(task.attempts)) if one.progress is not None]
    known = next((one.alone_per_s for one in own if one.alone_per_s is not None), None)
    return known if known is not None or task.estimate is None else task.estimate.alone_steps_per_s


def slowdown(state: State, task: Task, attempt: Attempt) -> Slowdown | None:
    """Of a running attempt now, of an ended one on average; None if unknown."""
    track = state.tracks.get(AttemptKey(task.id, attempt.number))
    if track is not None and track.pause_began_at is not None:
        return None
    if track is None:
        per_s = attempt.progress.per_s if attempt.progress is not None else None
    else:
        per_s = rate_now(state, track, state.now)
    alone_per_s = alone_rate(task, attempt, track)
    if per_s is not None and alone_per_s is not None:
        return Slowdown(alone_per_s / per_s, False)
    if track is not None:
        return _inferred(state, track)
    pace = attempt.alone.pace if attempt.alone is not None else 0.0
    return Slowdown(1.0 / pace, True) if pace > 0.0 else None


def _inferred(state: State, track: Track) -> Slowdown | None:
    """From the predicted rate and the observed activity, if the demand of every task on its GPUs is known."""
    if track.began_at is None or not track.on or any(seen.first_at is None for seen in track.on.values()):
        return None
    ratio = 1.0
    for gpu in track.on:
        live, held = state.live_of(gpu), state.on_gpu.get(gpu, {})
        if live.newest_members is None or live.newest_members.foreign:
            return None
        tracks = {key: state.tracks.get(key) for key in held}
        demands = [belief(state.tasks[key.task], one.on.get(gpu) if one else None) for key, one in tracks.items()]
        if len(held) > 1 and None in demands:
            return None
        ratio = min(ratio, live.activity_ratio)
    return Slowdown(1.0 / max(LEAST_RATIO, min(1.0, track.rate * ratio)), True)


# -- storing ----------------------------------------------------------------------------------------------------------


def progress_of(track: Track) -> StepProgress | None:
    """What is stored of the steps of an attempt."""
    record = track.step_record
    if record.newest is None:
        return None
    mean = record.counted / record.counted_s if record.counted_s >= LEAST_S else None
    return StepProgress(steps=record.newest.steps, per_s=rounded(mean), alone_per_s=rounded(record.alone_per_s))


def rounded(rate: float | None) -> float | None:
    """More digits would be noise."""
    return None if rate is None else float(f"{rate:.{DIGITS}g}")


def restore(track: Track, progress: StepProgress | None) -> None:
    """Continue with what was stored before a restart."""
    record = track.step_record
    if progress is None or record.newest is not None:
        return
    record.alone_per_s = progress.alone_per_s
    if progress.per_s:
        record.counted, record.counted_s = progress.steps, progress.steps / progress.per_s
