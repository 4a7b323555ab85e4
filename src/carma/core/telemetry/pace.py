"""Progress, speed and demand of each running attempt.

An attempt alone on a GPU shows its demand directly. Beside neighbours it is slower and shows less, so its observed
activity is divided by its predicted rate (scheduling/sharing_model.py). The demand of an attempt that was alone for
long enough is known; its activity beside neighbours then tells its real speed, and so whether the prediction was right.

Progress is measured in seconds that the completed work would have taken alone. It is updated when an attempt joins or
leaves one of the GPUs, not at every sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256

from carma.core.model.status import Running
from carma.core.model.task import Task
from carma.core.model.values import Alone, Correction, Demand, GpuId, GpuSample
from carma.core.scheduling.sharing_model import mechanism_of, progress_rates
from carma.core.state import State
from carma.core.telemetry.measurements import AttemptOnGpu, Live, Member, Track
from carma.core.telemetry.window import given

CALM_S = 10.0  # time without memory growth after which a task no longer starts up
BELIEVED_S = 15.0  # observation time after which an observed demand is used
OVERRIDE_RELATIVE, OVERRIDE_ABSOLUTE = 0.33, 0.05  # difference from which an observed demand replaces the estimated one
IDLE_RELATIVE = 0.25  # a task on several GPUs leaves a GPU idle below this part of its estimated demand
NO_DEMAND = Demand(0.0, 0.0, 0.0, 0.0, 0.0)  # of a GPU that the task leaves idle; such a GPU does not slow it down
LEAST_RATIO = 0.05  # minimum of observed / predicted activity, so that a task that waits for data is never stopped
MAX_COMMANDS = 16_384  # whose digests are remembered
MOST_COMMANDS = 1024  # commands whose observed demand is remembered
POOL_ROUNDS = 4  # the rate and the demand that follow from each other then change by less than 1 %
MOST_S = 15.0  # maximum weight of one sample, however long ago the previous one was


def belief(task: Task, seen: AttemptOnGpu | None) -> Demand | None:
    """The known demand of a task: from its estimate, from observation, or from an earlier attempt. A paused task has
    none."""
    packed = isinstance(task.status, Running) and task.status.idle is not None and task.status.idle.action == "pack"
    if task.paused is not None or packed:
        return NO_DEMAND
    known = seen is not None and seen.solo.seconds >= BELIEVED_S
    estimated = task.estimate.demand if task.estimate is not None else None
    if estimated is not None and not (known and seen is not None and _contradicts(task, seen, estimated)):
        return estimated if seen is None or seen.solo.alone_s < BELIEVED_S or not _predicted(task) else seen.solo.demand
    if known and seen is not None:
        return NO_DEMAND if estimated is not None and seen.solo.sm_active < OVERRIDE_ABSOLUTE else seen.solo.demand
    # What is stored of a running attempt is older than what is observed of it, and when it is stored decides nothing.
    for attempt in reversed(task.attempts if seen is None else task.attempts[:-1]):
        if attempt.alone is not None:
            return attempt.alone.demand
    return None


def observed_of_command(state: State, task: Task) -> Demand | None:
    """The demand that was observed of another task with the same command. Tasks on several GPUs have none: they may
    leave some of them idle."""
    return state.commands.get(command_of(task)) if task.spec.gpus == 1 else None


def _note_command(state: State, member: Member) -> None:
    """Keep the demand that was observed of the task for others with the same command, also after its end."""
    task = state.tasks[member.key.task]
    if task.spec.gpus > 1:
        return
    command = command_of(task)
    state.commands.pop(command, None)
    if len(state.commands) >= MOST_COMMANDS:
        del state.commands[next(iter(state.commands))]
    state.commands[command] = member.seen.solo.demand


def _predicted(task: Task) -> bool:
    """Whether the demand of its estimate was computed, not observed."""
    return task.estimate is not None and task.estimate.demand_predicted


def _contradicts(task: Task, seen: AttemptOnGpu, estimated: Demand) -> bool:
    """Whether the observed demand contradicts the estimate: some tasks leave all but one of their GPUs idle, and a task
    may have changed."""
    if task.spec.gpus > 1 and seen.solo.sm_active < IDLE_RELATIVE * estimated.sm_active:
        return True
    shown, expected = seen.solo.sm_active, estimated.sm_active
    limit = max(OVERRIDE_ABSOLUTE, OVERRIDE_RELATIVE * max(shown, expected))
    return seen.solo.alone_s >= BELIEVED_S and abs(shown - expected) > limit


def correction_of(state: State, task: Task, demand: Demand | None) -> Correction | None:
    """What is learned of the rates of its command; None if it has never shared a GPU, or if its demand is unknown, so
    that rates rest on an assumption that has nothing to do with it."""
    return None if demand is None or not state.corrections else state.corrections.get(command_of(task))


def command_of(task: Task) -> str:
    """Identifies the command among all users: as for history, its words, its directory and its files."""
    spec = task.spec
    return _command(task.owner.uid, spec.command, spec.directory, task.fingerprint)


@lru_cache(MAX_COMMANDS)
def _command(uid: int, command: tuple[str, ...], directory: str, fingerprint: str) -> str:
    words = "\0".join((directory, fingerprint, *command)).encode(errors="backslashreplace")
    return f"{uid}:{sha256(words).hexdigest()[:16]}"


# -- progress -------------------------------------------------------------------------------------------------------


def regroup(state: State, gpus: Iterable[GpuId], now: float) -> None:
    """Update progress and rates after an attempt joined or left these GPUs, turned out not to use one or began to, or
    after a demand became known."""
    touched: dict[int, Track] = {}
    for gpu in gpus:
        live = state.live_of(gpu)
        held = state.on_gpu.get(gpu, {})
        tracks = [(key, state.tracks[key]) for key in held if key in state.tracks]
        for _, track in tracks:
            track.advance_to(now, live.activity_ratio)
            touched[id(track)] = track
        demands = [_demand_now(state.tasks[key.task], track.on.get(gpu)) for key, track in tracks]
        corrections = [
            correction_of(state, state.tasks[key.task], demand)
            for (key, _), demand in zip(tracks, demands, strict=True)
        ]
        if len({command_of(state.tasks[key.task]) for key, _ in tracks}) == 1:
            demands = [
                demand or observed_of_command(state, state.tasks[key.task])
                for demand, (key, _) in zip(demands, tracks, strict=True)
            ]
        rates = progress_rates(demands, mechanism_of(state.rules), corrections=corrections)
        for (_, track), rate in zip(tracks, rates, strict=True):
            track.rates[gpu] = rate
        live.activity_ratio = 1.0
    for track in touched.values():
        track.rate = min(track.rates.values(), default=1.0)
        for gpu in track.on:  # its expected end has changed on all of its GPUs
            state.touch(gpu)


def _demand_now(task: Task, seen: AttemptOnGpu | None) -> Demand | None:
    """A task that does not use the GPU (it prepares data, or needs no GPU) slows nothing down."""
    return NO_DEMAND if seen is not None and seen.unused else belief(task, seen)


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
    """Learn from a span of `s` seconds that ends with the sample. `shares` are shares of the GPU's activity."""
    s = min(s, MOST_S)
    learnt: list[Member] = []
    one_command = len(present) > 1 and _of_one_command(state, present, sample.at)
    if one_command:
        shares = [sum(shares) / len(shares)] * len(shares)
    rates = [member.track.rate for member in present]  # the slowest GPU of an attempt slows it down on all of them
    if len(present) == 1 and not foreign and rates[0] >= 1.0:
        seen = present[0].seen
        if _calm(seen, sample.at) and seen.solo.see(sample, 1.0, s, alone=True, enough_s=BELIEVED_S):
            learnt.append(present[0])
    elif present:
        if len(present) > 1:  # an attempt slowed down on another GPU tells nothing about neighbours here
            _compare(state, live, present, rates, foreign, sample, s)
        # Not from inferred activity: the power of a shared GPU grows by less than its tasks draw alone, so that each of
        # them would look too light (simulated: mean slowdown 2.1 instead of 1.4 on the trace heavy).
        for member, share, rate in zip(present, shares, rates, strict=True) if sample.bound is None else ():
            if _calm(member.seen, sample.at) and member.seen.solo.alone_s < BELIEVED_S:
                part = share / rate
                if member.seen.solo.see(sample, part, s, alone=False, enough_s=BELIEVED_S):
                    learnt.append(member)
    if learnt and len(present) > 1:
        if one_command:
            _pool(state, present, learnt[0], sample)
        else:
            regroup(state, (sample.gpu,), sample.at)
    for member in learnt:
        if one_command or member.seen.solo.alone_s >= BELIEVED_S:
            _note_command(state, member)


def _of_one_command(state: State, present: Sequence[Member], at: float) -> bool:
    """Whether the attempts have the same command, none is starting up, and what is known of them was observed beside
    neighbours: they then have equal parts of what the GPU shows."""
    tasks = [state.tasks[member.key.task] for member in present]
    if len({command_of(task) for task in tasks}) > 1 or any(task.spec.gpus > 1 for task in tasks):
        return False
    estimated = any(task.estimate is not None and task.estimate.demand is not None for task in tasks)
    return not estimated and all(one.seen.solo.alone_s == 0.0 and _calm(one.seen, at) for one in present)


def _pool(state: State, present: Sequence[Member], learnt: Member, sample: GpuSample) -> None:
    """Tasks with the same command have the same demand: their part of what the GPU shows, divided by the rate that
    follows from this demand. Until now it was divided by the rate of tasks of unknown demand. Several demands may solve
    this (heavy tasks in turns show no more than light ones): it begins with the one that is known, if any."""
    observed, before = learnt.seen.solo.demand, learnt.track.rate
    demand, factor = observed_of_command(state, state.tasks[learnt.key.task]) or observed, 1.0
    for _ in range(POOL_ROUNDS):
        for member in present:
            member.seen.solo.adopt(demand, factor, BELIEVED_S)
        regroup(state, (sample.gpu,), sample.at)
        demand, factor = observed, before / learnt.track.rate


def _calm(seen: AttemptOnGpu, at: float) -> bool:
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
    """Update the ratio of observed to predicted activity, if every demand is known independently of this GPU."""
    active = given(sample, "sm_active")
    if active is None or foreign:
        return
    predicted = 0.0
    for member, rate in zip(present, rates, strict=True):
        demand = independent_demand(state.tasks[member.key.task], member.seen)
        if demand is None or not _calm(member.seen, sample.at):
            return
        predicted += demand.sm_active * rate
    if predicted > 0.05:
        ratio = min(1.0 / max(rates), max(LEAST_RATIO, active / min(1.0, predicted)))
        live.activity_ratio += (ratio - live.activity_ratio) * min(1.0, s / BELIEVED_S)


def independent_demand(task: Task, seen: AttemptOnGpu) -> Demand | None:
    """The task's demand, if it is known independently of these neighbours."""
    estimated = task.estimate.demand if task.estimate is not None and not _predicted(task) else None
    if estimated is not None and task.spec.gpus == 1:
        return estimated
    if estimated is None and seen.solo.alone_s < BELIEVED_S:
        return None
    return belief(task, seen) if seen.solo.seconds >= BELIEVED_S else None  # which of its GPUs it uses is known late


def alone_of(track: Track, now: float) -> Alone | None:
    """What is stored of the demand and the speed of an attempt."""
    known = [seen.solo.demand for seen in track.on.values() if seen.solo.seconds >= BELIEVED_S]
    if not known or track.ran_s(now) <= 0.0:
        return None
    most = max(known, key=lambda demand: demand.sm_active)  # its busiest GPU
    pace = min(1.0, track.done_by(now) / track.ran_s(now))
    return Alone(demand=_rounded(most), pace=round(pace, 4))


def _rounded(demand: Demand) -> Demand:
    engine = None if demand.gr_active is None else round(demand.gr_active, 4)
    return Demand(round(demand.sm_active, 4), round(demand.sm_occupancy, 4), round(demand.dram_active, 4), engine)
