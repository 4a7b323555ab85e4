"""Observations that are not logged: of an attempt, of an attempt on one GPU, of a GPU.

observation.py, attribution.py and pace.py fill them from samples. After a restart they start with what the log and the
checkpoint have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

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
POWER_SAMPLES = 5  # readings of power per mean: a single one may come from a counter that lagged


class PressureEstimate:
    """Estimated SM activity of an attempt, as a pressure with its variance (attribution.py)."""

    __slots__ = ("pressure", "variance")

    def __init__(self) -> None:
        self.pressure = 0.0  # a task holds memory before it computes
        self.variance = NEW_VARIANCE


class ObservedDemand:
    """Observed demand of an attempt alone: a mean with time constant FADES_S."""

    __slots__ = ("alone_s", "dram_active", "gr_active", "seconds", "sm_active", "sm_occupancy")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.alone_s = 0.0  # of that, without neighbours
        self.sm_active = self.sm_occupancy = self.dram_active = 0.0
        self.gr_active: float | None = None

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

    def restore(self, demand: Demand) -> None:
        """Continue with the figure from before a restart."""
        self.seconds = FADES_S
        self.sm_active, self.sm_occupancy, self.dram_active = demand.sm_active, demand.sm_occupancy, demand.dram_active
        self.gr_active = demand.gr_active

    @property
    def demand(self) -> Demand:
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active, self.gr_active)


class AttemptOnGpu:
    """One attempt on one GPU: its first use, its last memory growth, when it settled, and its estimated activity."""

    __slots__ = ("adopted", "first_at", "grown_at", "level_mib", "now_mib", "own", "settled_at", "solo")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.grown_at: float | None = None
        self.level_mib = 0  # memory from which growth is counted
        self.now_mib: int | None = None
        self.settled_at: float | None = None
        self.own = PressureEstimate()
        self.solo = ObservedDemand()
        self.adopted = False  # it was running before the daemon started, so that `first_at` may not be its first use


class Track:
    """One attempt, since the start of the daemon or since its last stored observation."""

    __slots__ = (
        "alone_s",
        "began_at",
        "done_s",
        "energy_j",
        "on",
        "paced_at",
        "peak_mib",
        "rate",
        "rates",
        "seconds",
        "shrinks",
        "totals",
        "used_s",
    )

    def __init__(self, gpus: Iterable[GpuId], peak_mib: int | None) -> None:
        self.on: dict[GpuId, AttemptOnGpu] = {gpu: AttemptOnGpu() for gpu in gpus}
        self.peak_mib = peak_mib
        self.shrinks = True  # whether its booking can still shrink (booking_shrink.py)
        self.energy_j: float | None = None
        self.used_s = 0.0  # GPU-seconds since its first use
        self.alone_s: float | None = None  # estimated run time alone
        self.began_at: float | None = None
        self.done_s = 0.0  # progress at `paced_at`, in seconds of run time alone (pace.py)
        self.paced_at = 0.0
        self.rate = 1.0  # predicted speed; 1: as fast as alone
        self.rates: dict[GpuId, float] = {}  # by GPU; the slowest one decides
        # Its share of each activity metric, integrated over time, and the time for which it was measured.
        self.seconds = [0.0] * len(ACTIVITY_METRICS)
        self.totals = [0.0] * len(ACTIVITY_METRICS)

    def begin(self, at: float, done_s: float = 0.0) -> None:
        self.began_at = self.paced_at = at
        self.done_s = done_s

    def done_by(self, at: float, activity_ratio: float = 1.0) -> float:
        if self.began_at is None:
            return 0.0
        return self.done_s + min(1.0, self.rate * activity_ratio) * max(0.0, at - self.paced_at)

    def advance_to(self, at: float, activity_ratio: float) -> None:
        self.done_s = self.done_by(at, activity_ratio)
        self.paced_at = max(at, self.paced_at)

    @property
    def activity(self) -> Activity | None:
        """Its share, as a mean since its first use; None before."""
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


class Members:
    """The attempts on a GPU when a sample was taken."""

    __slots__ = ("foreign", "nobody", "present", "resting", "shares")

    def __init__(self, present: list[Member], resting: list[Member], *, foreign: bool) -> None:
        self.present = present  # hold memory there
        self.resting = resting  # held memory there before
        self.foreign = foreign  # whether foreign processes hold memory
        self.nobody = not present and not foreign
        self.shares: list[float] | None = None  # of the present ones, if the same for every sample


class Hour:
    """The sums of one GpuUsage."""

    __slots__ = ("energy_j", "guessed_s", "held_s", "idle_j", "shared_s", "sm_s", "tasks_j", "watched_s")

    def __init__(self) -> None:
        self.watched_s = self.held_s = self.shared_s = self.sm_s = 0.0
        self.energy_j = self.idle_j = self.tasks_j = self.guessed_s = 0.0


class Live:
    """One GPU. `since` is when a task last joined or left it; older samples show other tasks."""

    __slots__ = (
        "activity_ratio",
        "background",
        "empty_for",
        "empty_w",
        "ended_above_booking",
        "held",
        "held_of",
        "left_at",
        "lowest_w",
        "members",
        "newest_members",
        "newest_memory",
        "recent_w",
        "shown",
        "since",
        "window",
    )

    def __init__(self, length_s: float) -> None:
        self.window = Window(length_s)
        self.newest_memory: GpuSample | None = None  # newest sample with memory: a full sample or a memory sample
        self.held: dict[AttemptKey, int | None] = {}  # MiB of each attempt in `held_of`
        self.held_of: tuple[ProcessUse, ...] | None = None
        self.shown: list[TaskId] = []  # tasks with processes in `newest_memory`
        self.members: list[Member] | None = None  # attempts on it; None: to be computed
        self.newest_members: Members | None = None  # by the newest sample; None: depends on the sample
        self.since = 0.0
        self.activity_ratio = 1.0  # observed / predicted activity of the attempts on it (pace.py)
        self.left_at = 0.0  # when a task last left it
        self.ended_above_booking: dict[AttemptKey, float] = {}  # attempts that ended above their booking, and when
        self.background = PressureEstimate()  # of foreign processes
        self.recent_w: deque[float] = deque(maxlen=POWER_SAMPLES)
        self.empty_for = 0  # consecutive readings of power without processes
        self.lowest_w: float | None = None  # lowest mean of `recent_w`
        self.empty_w: float | None = None  # lowest single reading without processes, used until there is a mean
