"""Duration and demand of the tasks of a recorded run if they had run alone, derived from how they ran together.

The tasks on each GPU are known at every moment, so the time is divided at each start and end of an attempt. In each
piece the sharing model gives the speed of each task; the sum is its work, which equals its duration alone. The activity
of a task on the GPU is its demand times its speed. Demands give speeds and speeds give demands: both are computed in
turns until they agree.

Solo times that are derived in this way depend on the model that is tested. Each one therefore states its source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import astuple

from carma.core.model.values import Activity, Demand, Record
from carma.core.scheduling.sharing_model import Mechanism, progress_rates
from carma_lab.runs.figures import Ran, TaskRun

ALONE = 0.995  # minimum mean speed of a task that counts as alone on its GPUs
CLOSE = 1e-6
MOST_TURNS = 200
RAMP_LOSS = 0.5  # mean share of the demand that a simulated task does not show during its ramp (simulated_server.py)
LONGEST_RAMP = 0.5  # of the work, as in the simulator
IDLE = Demand(0.0, 0.0, 0.0, 0.0, 0.0)

How = Literal["given", "alone", "inferred"]


class Known(Record, frozen=True, kw_only=True):
    """Duration alone and demand of the tasks of a name, from another source."""

    seconds: float  # start-up included
    demand: Demand | None = None


class Solo(Record, frozen=True, kw_only=True):
    """One task alone. `how`: its duration is given by another source, or it was alone in this run, or its duration was
    derived with the sharing model."""

    seconds: float  # the whole run
    start_s: float  # of that, before its first use of a GPU
    ramp_s: float
    demand: Demand
    how: How
    rate: float  # mean speed in the recorded run


class Meters(NamedTuple):
    """The meaning of the figures of attempts."""

    above_idle_w: float | None  # power range of the card; None: the power of a demand is not computed
    ramp_is_idle: bool  # whether a task shows less of its demand while its memory grows
    engine: Literal["own", "alone", "never"]  # engine activity is used of all tasks, only of tasks alone, of none


class Stay(NamedTuple):
    """One attempt on its GPUs."""

    task: int  # its index
    ran: Ran
    working: tuple[int, ...]  # the GPUs that it works on

    @property
    def begin(self) -> float:
        return self.ran.first_use

    @property
    def last(self) -> float:
        return self.ran.ended_at


class Piece(NamedTuple):
    """A period without a start or an end; `on`: indices of the stays on each GPU."""

    begin: float
    end: float
    on: tuple[tuple[int, ...], ...]


def solos(
    tasks: Sequence[TaskRun], mechanism: Mechanism, meters: Meters, known: Mapping[str, Known] | None = None
) -> list[Solo]:
    """One for each task, in order; a task that never ran has zeros."""
    known = known or {}
    stays = [
        Stay(place, ran, ran.gpus[: task.busy_gpus or None])
        for place, task in enumerate(tasks)
        for ran in task.attempts
        if ran.used_s is None or ran.used_s > 0.0
    ]
    pieces = pieces_of(stays)
    crowded = {number for piece in pieces for on_gpu in piece.on if len(on_gpu) > 1 for number in on_gpu}
    # The demands that are known.
    fixed = [
        known[task.name].demand if task.name in known else task.demand for task in (tasks[stay.task] for stay in stays)
    ]

    def found_at(speeds: Sequence[Mapping[int, float]]) -> list[Demand]:
        return [
            own or _demand(stay, pieces, speeds[number], meters, number not in crowded)
            for number, (own, stay) in enumerate(zip(fixed, stays, strict=True))
        ]

    # The iteration starts at full speed: if tasks slow each other down a lot, several sets of demands explain the
    # measurement, and the smallest one is taken.
    demands = found_at(speeds_in(stays, pieces, [IDLE] * len(stays), mechanism))
    speeds = speeds_in(stays, pieces, demands, mechanism)
    for _ in range(MOST_TURNS):
        found = found_at(speeds)
        moved = max((_distance(new, old) for new, old in zip(found, demands, strict=True)), default=0.0)
        # Half steps: a larger demand of a task increases the derived demands of its neighbours, which would oscillate.
        demands = [_between(old, new) for old, new in zip(demands, found, strict=True)]
        speeds = speeds_in(stays, pieces, demands, mechanism)
        if moved < CLOSE:
            break
    last = {stay.task: number for number, stay in enumerate(stays)}
    return [
        _solo(task, known.get(task.name), stays, pieces, demands, speeds, last.get(place))
        for place, task in enumerate(tasks)
    ]


def pieces_of(stays: Sequence[Stay]) -> list[Piece]:
    edges = sorted({edge for stay in stays for edge in (stay.begin, stay.last)})
    gpus = 1 + max((gpu for stay in stays for gpu in stay.ran.gpus), default=-1)
    coming = sorted(range(len(stays)), key=lambda number: stays[number].begin)
    present: list[int] = []
    pieces = []
    place = 0
    for begin, end in itertools.pairwise(edges):
        while place < len(coming) and stays[coming[place]].begin <= begin:
            present.append(coming[place])
            place += 1
        present = [number for number in present if stays[number].last > begin]
        on = tuple(tuple(number for number in present if gpu in stays[number].ran.gpus) for gpu in range(gpus))
        pieces.append(Piece(begin, end, on))
    return pieces


def speeds_in(
    stays: Sequence[Stay], pieces: Sequence[Piece], demands: Sequence[Demand], mechanism: Mechanism
) -> list[dict[int, float]]:
    """Speed of each stay in each of its pieces: that of its slowest GPU."""
    speeds: list[dict[int, float]] = [{} for _ in demands]
    for number, piece in enumerate(pieces):
        for gpu, who in enumerate(piece.on):
            rates = progress_rates([demands[one] if gpu in stays[one].working else IDLE for one in who], mechanism)
            for one, rate in zip(who, rates, strict=True):
                speeds[one][number] = min(rate, speeds[one].get(number, 1.0))
    return speeds


def work_s(pieces: Sequence[Piece], speeds: Mapping[int, float], until: float = float("inf")) -> float:
    return sum(
        speed * max(0.0, min(pieces[number].end, until) - pieces[number].begin) for number, speed in speeds.items()
    )


def _demand(stay: Stay, pieces: Sequence[Piece], speeds: Mapping[int, float], meters: Meters, lone: bool) -> Demand:
    """Demand of the task: its activity, divided by the share of its demand that it could show."""
    done_s = work_s(pieces, speeds)
    if meters.ramp_is_idle:
        done_s -= RAMP_LOSS * _ramp_s(stay, pieces, speeds)
    times = (stay.last - stay.begin) / done_s if done_s > 0.0 else 1.0
    seen = stay.ran.activity or Activity()
    # Engine activity of several tasks on one GPU overlaps, so it is used only of a task alone.
    engine = seen.gr_active if meters.engine == "own" or (lone and meters.engine == "alone") else None
    power = None
    if meters.above_idle_w and stay.ran.energy_j is not None and stay.ran.used_s:
        power = stay.ran.energy_j / len(stay.ran.gpus) / stay.ran.used_s / meters.above_idle_w
    return Demand(
        *(min(1.0, (value or 0.0) * times) for value in (seen.sm_active, seen.sm_occupancy, seen.dram_active)),
        *(None if value is None else min(1.0, value * times) for value in (engine, power)),
    )


def _ramp_s(stay: Stay, pieces: Sequence[Piece], speeds: Mapping[int, float]) -> float:
    """Ramp of the task in seconds of run time alone."""
    ramp_s = work_s(pieces, speeds, stay.begin + (stay.ran.ramp_s or 0.0))
    return min(ramp_s, LONGEST_RAMP * work_s(pieces, speeds))


def _distance(one: Demand, other: Demand) -> float:
    pairs: Iterable[tuple[float | None, float | None]] = zip(astuple(one), astuple(other), strict=True)
    return max(abs((a or 0.0) - (b or 0.0)) for a, b in pairs)


def _between(old: Demand, new: Demand) -> Demand:
    def half(name: str) -> float | None:
        before: float | None = getattr(old, name)
        after: float | None = getattr(new, name)
        return after if before is None or after is None else (before + after) / 2

    return Demand(**{name: half(name) for name in Demand.__struct_fields__})  # type: ignore[arg-type]


def _solo(
    task: TaskRun,
    known: Known | None,
    stays: Sequence[Stay],
    pieces: Sequence[Piece],
    demands: Sequence[Demand],
    speeds: Sequence[Mapping[int, float]],
    last: int | None,
) -> Solo:
    """Run time alone, from the last attempt; the work of earlier attempts was lost."""
    if last is None or not task.attempts or stays[last].ran is not task.attempts[-1]:
        ran_s = _since_start_s(task.attempts[-1], task.attempts[-1].ended_at) if task.attempts else 0.0
        return Solo(seconds=ran_s, start_s=ran_s, ramp_s=0.0, demand=IDLE, how="alone", rate=1.0)
    stay, own = stays[last], speeds[last]
    start_s = _since_start_s(stay.ran, stay.begin)
    done_s = work_s(pieces, own)
    rate = done_s / max(1e-9, stay.last - stay.begin)
    how: How = "alone" if rate >= ALONE else "inferred"
    given_s = known.seconds if known is not None else task.alone_s if task.outcome == "succeeded" else None
    if given_s is not None:
        how, start_s, done_s = "given", min(start_s, given_s), max(0.0, given_s - start_s)
    return Solo(
        seconds=start_s + done_s,
        start_s=start_s,
        ramp_s=_ramp_s(stay, pieces, own),
        demand=demands[last],
        how=how,
        rate=rate,
    )


def _since_start_s(ran: Ran, at: float) -> float:
    return max(0.0, at - (ran.placed_at if ran.started_at is None else ran.started_at))
