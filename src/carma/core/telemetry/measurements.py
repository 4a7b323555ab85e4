"""Observations that are not logged: of an attempt, of an attempt on one GPU, of a GPU.

observation.py, attribution.py and pace.py fill them from samples. After a restart they start with what the log and the
checkpoint have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from msgspec.structs import asdict

from carma.core.model.values import (
    ACTIVITY_METRICS,
    Activity,
    Alone,
    AttemptKey,
    Demand,
    GpuId,
    GpuSample,
    ProcessUse,
    Record,
    TaskId,
)
from carma.core.telemetry.window import Window

HIDDEN_MIB = 1024  # memory that the driver may use itself; unlisted processes hold what is in use beyond that
NEW_VARIANCE = 0.5  # of a new attempt, which may be idle or may fill the GPU
FADES_S = 60.0  # time constant of the mean of an observed demand
MOST_POINTS = 1024  # of an attempt's steps; their times are written by its user, who could let them stand still
POWER_SAMPLES = 5  # readings of power per mean: a single one may come from a counter that lagged


@dataclass(slots=True, eq=False)
class PressureEstimate:
    """Estimated SM activity of an attempt, as a pressure with its variance (attribution.py)."""

    pressure: float = 0.0  # a task holds memory before it computes
    variance: float = NEW_VARIANCE


@dataclass(slots=True, eq=False)
class ObservedDemand:
    """Observed demand of an attempt alone: a mean with time constant FADES_S."""

    seconds: float = 0.0
    alone_s: float = 0.0  # of that, without neighbours
    sm_active: float = 0.0
    sm_occupancy: float = 0.0
    dram_active: float = 0.0
    gr_active: float | None = None

    def see(self, sample: GpuSample, part: float, seconds: float, *, alone: bool, enough_s: float) -> bool:
        """`part`: its share of the sample's activity. Returns whether its observation time just reached `enough_s`."""
        shown = sample.activity
        if shown.sm_active is None:
            return False
        before_s = self.seconds
        if alone and self.alone_s == 0.0:
            self.seconds = 0.0  # observations without neighbours replace the others
        self.seconds += seconds
        self.alone_s += seconds if alone else 0.0
        weight = min(1.0, seconds / min(self.seconds, FADES_S))
        active = shown.sm_active * part
        self.sm_active += ((active if active < 1.0 else 1.0) - self.sm_active) * weight
        # Metrics that the driver lacks count as in a typical task with this SM activity.
        occupancy = part * (0.45 * shown.sm_active if shown.sm_occupancy is None else shown.sm_occupancy)
        dram = part * (0.5 * shown.sm_active if shown.dram_active is None else shown.dram_active)
        self.sm_occupancy += ((occupancy if occupancy < 1.0 else 1.0) - self.sm_occupancy) * weight
        self.dram_active += ((dram if dram < 1.0 else 1.0) - self.dram_active) * weight
        if alone and shown.gr_active is not None:  # with neighbours it tells nothing about one of them
            before = shown.gr_active if self.gr_active is None else self.gr_active
            self.gr_active = before + (shown.gr_active - before) * weight
        return before_s < enough_s <= self.seconds

    def adopt(self, demand: Demand, factor: float, enough_s: float) -> None:
        """Continue with what was observed of another task with the same command, times `factor`."""
        self.seconds = max(self.seconds, enough_s)
        self.sm_active = min(1.0, factor * demand.sm_active)
        self.sm_occupancy = min(1.0, factor * demand.sm_occupancy)
        self.dram_active = min(1.0, factor * demand.dram_active)

    def restore(self, demand: Demand) -> None:
        """Continue with the figure from before a restart."""
        self.seconds = FADES_S
        self.sm_active, self.sm_occupancy, self.dram_active = demand.sm_active, demand.sm_occupancy, demand.dram_active
        self.gr_active = demand.gr_active

    @property
    def demand(self) -> Demand:
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active, self.gr_active)


class StepPoint(NamedTuple):
    """The count of optimizer steps, and when the last of them was made."""

    at: float
    steps: int


@dataclass(slots=True, eq=False)
class StepRecord:
    """The optimizer steps of an attempt (step_rates.py)."""

    newest: StepPoint | None = None
    points: deque[StepPoint] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))  # with the present neighbours
    per_s: float | None = None  # over `points`
    alone_per_s: float | None = None
    counted: int = 0  # steps whose time is known, and that time without pauses
    counted_s: float = 0.0
    together: StepPoint | None = None  # the first count since all tasks on its GPU have settled
    learned_until: StepPoint | None = None  # the newest count from which a correction was learned


@dataclass(slots=True, eq=False)
class AttemptOnGpu:
    """One attempt on one GPU: its first use, its last memory growth, when it settled, and its estimated activity."""

    first_at: float | None = None
    grown_at: float | None = None
    level_mib: int = 0  # memory from which growth is counted
    now_mib: int | None = None
    settled_at: float | None = None
    own: PressureEstimate = field(default_factory=PressureEstimate)
    solo: ObservedDemand = field(default_factory=ObservedDemand)
    busy_at: float | None = None  # when it last used the SMs, or began to hold memory (idle.py); None: it holds none
    unused: bool = False  # it has run for a while without using the GPU (observation.py)
    adopted: bool = False  # it was running before the daemon started, so that `first_at` may not be its first use


def _zeros() -> list[float]:
    return [0.0] * len(ACTIVITY_METRICS)


@dataclass(slots=True, eq=False)
class Track:
    """One attempt, since the start of the daemon or since its last stored observation."""

    gpus: InitVar[Iterable[GpuId]]
    peak_mib: int | None
    on: dict[GpuId, AttemptOnGpu] = field(init=False)
    shrinks: bool = True  # whether its booking can still shrink (booking_shrink.py)
    energy_j: float | None = None
    used_s: float = 0.0  # GPU-seconds since its first use
    alone_s: float | None = None  # estimated run time alone
    began_at: float | None = None
    paused_s: float = 0.0  # in all ended pauses
    pause_began_at: float | None = None  # None: it is not paused
    slowed_since: float | None = None  # beyond the limit (slowed.py); None: it is not
    done_s: float = 0.0  # progress at `paced_at`, in seconds of run time alone (pace.py)
    paced_at: float = 0.0
    rate: float = 1.0  # predicted speed; 1: as fast as alone
    rates: dict[GpuId, float] = field(default_factory=dict)  # by GPU; the slowest one decides
    step_record: StepRecord = field(default_factory=StepRecord)
    # Its share of each activity metric, integrated over time, and the time for which it was measured.
    seconds: list[float] = field(default_factory=_zeros)
    totals: list[float] = field(default_factory=_zeros)

    def __post_init__(self, gpus: Iterable[GpuId]) -> None:
        self.on = {gpu: AttemptOnGpu() for gpu in gpus}

    def begin(self, at: float, done_s: float = 0.0) -> None:
        self.began_at = self.paced_at = at
        self.done_s = done_s

    def done_by(self, at: float, activity_ratio: float = 1.0) -> float:
        if self.began_at is None:
            return 0.0
        if self.pause_began_at is not None:
            return self.done_s
        return self.done_s + min(1.0, self.rate * activity_ratio) * max(0.0, at - self.paced_at)

    def ran_s(self, at: float) -> float:
        """Run time until then, without pauses."""
        until = at if self.pause_began_at is None else min(at, self.pause_began_at)
        return 0.0 if self.began_at is None else max(0.0, until - self.began_at - self.paused_s)

    def continue_at(self, at: float) -> None:
        """The pause ends. It does not count as time without memory growth or use."""
        if self.pause_began_at is None:
            return
        lasted_s = max(0.0, at - self.pause_began_at)
        self.pause_began_at = None
        self.paused_s += lasted_s
        for seen in self.on.values():
            seen.first_at = None if seen.first_at is None else seen.first_at + lasted_s
            seen.grown_at = None if seen.grown_at is None else seen.grown_at + lasted_s
            seen.busy_at = None if seen.busy_at is None else seen.busy_at + lasted_s

    def advance_to(self, at: float, activity_ratio: float) -> None:
        self.done_s = self.done_by(at, activity_ratio)
        self.paced_at = max(at, self.paced_at)

    @property
    def activity(self) -> Activity | None:
        """Mean activity of the attempt since its first use; None before."""
        found = {
            name: round(total / seconds, 5)
            for name, total, seconds in zip(ACTIVITY_METRICS, self.totals, self.seconds, strict=True)
            if seconds > 0
        }
        return Activity(**found) if found else None

    def restore(
        self, energy_j: float | None, activity: Activity | None, used_s: float, alone: Alone | None = None
    ) -> None:
        """Continue with the observations from before a restart."""
        if used_s <= self.used_s:
            return
        if alone is not None:
            for seen in self.on.values():
                seen.solo.restore(alone.demand)
        self.used_s, self.energy_j = used_s, energy_j
        for place, value in enumerate(asdict(activity or Activity()).values()):
            self.seconds[place] = 0.0 if value is None else used_s
            self.totals[place] = 0.0 if value is None else value * used_s


class Member(Record, frozen=True):
    """One attempt on one GPU, with its observations."""

    key: AttemptKey
    track: Track
    seen: AttemptOnGpu


@dataclass(slots=True, eq=False)
class Members:
    """The attempts on a GPU when a sample was taken."""

    present: list[Member]  # hold memory there
    resting: list[Member]  # held memory there before
    foreign: bool  # whether foreign processes hold memory
    shares: list[float] | None = None  # of the present ones, if the same for every sample

    @property
    def empty(self) -> bool:
        return not self.present and not self.foreign


@dataclass(slots=True, eq=False)
class Hour:
    """The sums of one GpuUsage."""

    watched_s: float = 0.0
    held_s: float = 0.0
    shared_s: float = 0.0
    sm_s: float = 0.0
    energy_j: float = 0.0
    idle_j: float = 0.0
    tasks_j: float = 0.0
    guessed_s: float = 0.0


@dataclass(slots=True, eq=False)
class Live:
    """One GPU. `since` is when a task last joined or left it; older samples show other tasks."""

    length_s: InitVar[float]
    window: Window = field(init=False)
    newest_memory: GpuSample | None = None  # newest sample with memory: a full sample or a memory sample
    held: dict[AttemptKey, int | None] = field(default_factory=dict)  # MiB of each attempt in `held_of`
    held_of: tuple[ProcessUse, ...] | None = None
    shown: list[TaskId] = field(default_factory=list)  # tasks with processes in `newest_memory`
    members: list[Member] | None = None  # attempts on it; None: to be computed
    newest_members: Members | None = None  # by the newest sample; None: depends on the sample
    since: float = 0.0
    activity_ratio: float = 1.0  # observed / predicted activity of the attempts on it (pace.py)
    left_at: float = 0.0  # when a task last left it
    ended_above_booking: dict[AttemptKey, float] = field(default_factory=dict)  # attempts, and when they ended
    background: PressureEstimate = field(default_factory=PressureEstimate)  # of foreign processes
    recent_w: deque[float] = field(default_factory=lambda: deque(maxlen=POWER_SAMPLES))
    empty_for: int = 0  # consecutive readings of power without processes
    lowest_w: float | None = None  # lowest mean of `recent_w`
    empty_w: float | None = None  # lowest single reading without processes, used until there is a mean

    def __post_init__(self, length_s: float) -> None:
        self.window = Window(length_s)
