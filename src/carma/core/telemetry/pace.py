"""How far each attempt is thought to be, how fast it goes, and what it would keep busy if it were alone.

Alone on a GPU, an attempt shows its demand itself. Beside others it is slowed down and shows less in proportion, so
what is seen of it is divided by its predicted rate (sharing.py). An attempt that was alone long enough is believed from
then on: what it shows beside others tells how fast it really goes, and with it whether the prediction was right.

Progress is counted in seconds that the work done would have taken alone. It is added up whenever somebody comes to one
of its GPUs or leaves it, not at every sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from carma.core.model.settings import Rules
from carma.core.model.task import Task
from carma.core.model.values import Alone, Demand, GpuId, GpuSample
from carma.core.scheduling.sharing_model import Mechanism, progress_rates
from carma.core.telemetry.measurements import Live, Seen, Track
from carma.core.telemetry.window import given

if TYPE_CHECKING:  # attribution.py calls this one
    from carma.core.state import State
    from carma.core.telemetry.attribution import Member

CALM_S = 10.0  # its memory has not grown for so long: before that a task is starting up
BELIEVED_S = 15.0  # so much must have been seen of one before it is believed
OTHER, SLIGHT = 0.33, 0.05  # alone it shows so much else than was told, as a part of it and at all
IDLE = 0.25  # so much of what was told is seen at most where a task leaves a GPU idle
NOTHING = Demand(0.0, 0.0, 0.0, 0.0, 0.0)  # of a GPU that it leaves idle, which does not hold it up either
LEAST = 0.05  # of what was predicted, though a GPU shows nothing: somebody who waits for data is not done for ever
MOST_S = 15.0  # so much a single sample tells at most, however long the one before it was ago


def mechanism_of(rules: Rules) -> Mechanism:
    return "timeslice" if rules.sharing.mechanism == "timeslice" else "mps"


def belief(task: Task, seen: Seen | None) -> Demand | None:
    """What is known of a task's demand: by its estimate, by what was seen of it now, or in an earlier attempt."""
    known = seen is not None and seen.solo.seconds >= BELIEVED_S
    told = task.estimate.demand if task.estimate is not None else None
    if told is not None and not (known and seen is not None and _other_than(task, seen, told)):
        return told if seen is None or seen.solo.alone_s < BELIEVED_S or not _predicted(task) else seen.solo.demand
    if known and seen is not None:
        return NOTHING if told is not None and seen.solo.sm_active < SLIGHT else seen.solo.demand
    for attempt in reversed(task.attempts):
        if attempt.alone is not None:
            return attempt.alone.demand
    return None


def _predicted(task: Task) -> bool:
    """Nobody saw what its estimate tells."""
    return task.estimate is not None and task.estimate.demand_predicted


def _other_than(task: Task, seen: Seen, told: Demand) -> bool:
    """Some tasks leave all but one of their GPUs idle; one that shows alone what was never said of it has changed."""
    if task.spec.gpus > 1 and seen.solo.sm_active < IDLE * told.sm_active:
        return True
    off = abs(seen.solo.sm_active - told.sm_active)
    return seen.solo.alone_s >= BELIEVED_S and off > OTHER * max(told.sm_active, seen.solo.sm_active) and off > SLIGHT


# -- progress -------------------------------------------------------------------------------------------------------


def regroup(state: State, gpus: Iterable[GpuId], now: float) -> None:
    """Somebody has come to those GPUs or left them, or more is known of those who are there."""
    touched: dict[int, Track] = {}
    for gpu in gpus:
        live = state.live_of(gpu)
        held = state.on_gpu.get(gpu, {})
        tracks = [(key, state.tracks[key]) for key in held if key in state.tracks]
        for _, track in tracks:
            track.go_on_until(now, live.truth)
            touched[id(track)] = track
        demands = [belief(state.tasks[key.task], track.on.get(gpu)) for key, track in tracks]
        for (_, track), rate in zip(tracks, progress_rates(demands, mechanism_of(state.rules)), strict=True):
            track.rates[gpu] = rate
        live.truth = 1.0
    for track in touched.values():
        track.rate = min(track.rates.values(), default=1.0)
        for gpu in track.on:  # when it should end has changed there too
            state.touch(gpu)
            if state.policy.against is not None:
                _touch_beside(state, gpu)


def _touch_beside(state: State, gpu: GpuId) -> None:
    """Those who have other GPUs, too, are seen there with whoever is beside them here (snapshot.py: `_beside`)."""
    for placement in state.on_gpu.get(gpu, {}).values():
        if len(placement.gpus) > 1:
            for other in placement.gpus:
                state.touch(other)


# -- demand ---------------------------------------------------------------------------------------------------------


def follow(
    state: State,
    live: Live,
    present: Sequence[Member],
    shares: Sequence[float],
    foreign: bool,
    sample: GpuSample,
    s: float,
) -> None:
    """A span of `s` seconds that ends with that sample. `shares` are of what the GPU showed."""
    s = min(s, MOST_S)
    learnt = False
    rates = [member.track.rate for member in present]  # of several GPUs the slowest: it shows less on the others, too
    if len(present) == 1 and not foreign and rates[0] >= 1.0:
        seen = present[0].seen
        if _calm(seen, sample.at):
            learnt = seen.solo.see(sample, 1.0, s, alone=True, enough_s=BELIEVED_S)
    elif present:
        if len(present) > 1:  # one that is held up on another GPU of its own says nothing of company here
            _compare(state, live, present, rates, foreign, sample, s)
        for member, share, rate in zip(present, shares, rates, strict=True):
            if _calm(member.seen, sample.at) and member.seen.solo.alone_s < BELIEVED_S:
                part = share / rate
                learnt = member.seen.solo.see(sample, part, s, alone=False, enough_s=BELIEVED_S) or learnt
    if learnt and len(present) > 1:
        regroup(state, (sample.gpu,), sample.at)


def _calm(seen: Seen, at: float) -> bool:
    return seen.first_at is not None and at - max(seen.first_at, seen.grown_at or 0.0) >= CALM_S


def _compare(
    state: State,
    live: Live,
    present: Sequence[Member],
    rates: Sequence[float],
    foreign: bool,
    sample: GpuSample,
    s: float,
) -> None:
    """How much of what was predicted the GPU shows, where all of them are known from elsewhere than from here."""
    active = given(sample, "sm_active")
    if active is None or foreign:
        return
    predicted = 0.0
    for member, rate in zip(present, rates, strict=True):
        demand = _believed(state.tasks[member.key.task], member.seen)
        if demand is None or not _calm(member.seen, sample.at):
            return
        predicted += demand.sm_active * rate
    if predicted > 0.05:
        ratio = min(1.0 / max(rates), max(LEAST, active / min(1.0, predicted)))
        live.truth += (ratio - live.truth) * min(1.0, s / BELIEVED_S)


def _believed(task: Task, seen: Seen) -> Demand | None:
    """What is known of it from elsewhere than from this company."""
    told = task.estimate.demand if task.estimate is not None and not _predicted(task) else None
    if told is not None and task.spec.gpus == 1:
        return told
    if told is None and seen.solo.alone_s < BELIEVED_S:
        return None
    return belief(task, seen) if seen.solo.seconds >= BELIEVED_S else None  # which of its GPUs it uses shows late


def alone_of(track: Track, now: float) -> Alone | None:
    """What is put on record of an attempt."""
    known = [seen.solo.demand for seen in track.on.values() if seen.solo.seconds >= BELIEVED_S]
    if not known or track.began_at is None or now <= track.began_at:
        return None
    most = max(known, key=lambda demand: demand.sm_active)  # of several GPUs, the busiest
    pace = min(1.0, track.done_by(now) / (now - track.began_at))
    return Alone(demand=_rounded(most), pace=round(pace, 4))


def _rounded(demand: Demand) -> Demand:
    engine = None if demand.gr_active is None else round(demand.gr_active, 4)
    return Demand(round(demand.sm_active, 4), round(demand.sm_occupancy, 4), round(demand.dram_active, 4), engine)
