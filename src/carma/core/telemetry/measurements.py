"""What is seen and not logged: of an attempt, of an attempt on one GPU, of a GPU. Filled by observe.py and
attribution.py, from samples alone; empty after a restart but for what the log and its checkpoint carry along.
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

NEW_VARIANCE = 0.5  # of one that is new: it may do nothing yet, or fill the GPU
FADES_S = 60.0  # what was seen of a demand longer ago than this fades
POWER_SAMPLES = 5  # a GPU's power is judged by the mean of so many: a single reading may be a counter that lagged


class Guess:
    """What somebody's own SM activity is thought to be, as a pressure, and how far off that may be (attribution.py)."""

    __slots__ = ("pressure", "variance")

    def __init__(self) -> None:
        self.pressure = 0.0  # tasks hold memory before they compute
        self.variance = NEW_VARIANCE


class Solo:
    """What an attempt is thought to keep busy alone: a mean that forgets."""

    __slots__ = ("alone_s", "dram_active", "gr_active", "seconds", "sm_active", "sm_occupancy")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.alone_s = 0.0  # of that, with the GPU to itself
        self.sm_active = self.sm_occupancy = self.dram_active = 0.0
        self.gr_active: float | None = None

    def see(self, sample: GpuSample, part: float, seconds: float, *, alone: bool, enough_s: float) -> bool:
        """`part`: of what the sample shows. Whether it has just been seen for long enough."""
        shown = sample.activity
        if shown.sm_active is None:
            return False
        before_s = self.seconds
        if alone and self.alone_s == 0.0:
            self.seconds = 0.0  # what it shows alone counts for more than what was made of it beside others
        self.seconds += seconds
        self.alone_s += seconds if alone else 0.0
        weight = min(1.0, seconds / min(self.seconds, FADES_S))
        active = shown.sm_active * part
        self.sm_active += ((active if active < 1.0 else 1.0) - self.sm_active) * weight
        # What the driver does not give counts as in a typical task with so much SM activity.
        occupancy = part * (0.45 * shown.sm_active if shown.sm_occupancy is None else shown.sm_occupancy)
        dram = part * (0.5 * shown.sm_active if shown.dram_active is None else shown.dram_active)
        self.sm_occupancy += ((occupancy if occupancy < 1.0 else 1.0) - self.sm_occupancy) * weight
        self.dram_active += ((dram if dram < 1.0 else 1.0) - self.dram_active) * weight
        if alone and shown.gr_active is not None:  # beside others it says nothing of one
            before = shown.gr_active if self.gr_active is None else self.gr_active
            self.gr_active = before + (shown.gr_active - before) * weight
        return before_s < enough_s <= self.seconds

    def start_from(self, demand: Demand) -> None:
        """What an earlier life of the daemon thought."""
        self.seconds = FADES_S
        self.sm_active, self.sm_occupancy, self.dram_active = demand.sm_active, demand.sm_occupancy, demand.dram_active
        self.gr_active = demand.gr_active

    @property
    def demand(self) -> Demand:
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active, self.gr_active)


class Seen:
    """Of one attempt on one GPU: when it first touched it, when its memory last grew, when it settled; and how
    much of the GPU's activity is thought to be its own."""

    __slots__ = ("adopted", "first_at", "grown_at", "level_mib", "now_mib", "own", "settled_at", "solo")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.grown_at: float | None = None
        self.level_mib = 0  # the memory from which growth is counted
        self.now_mib: int | None = None
        self.settled_at: float | None = None
        self.own = Guess()
        self.solo = Solo()
        self.adopted = False  # it may have used the GPU before this life of the daemon: `first_at` is not its first use


class Track:
    """Of one attempt since this process started looking, or since what the log kept of it."""

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
        self.on: dict[GpuId, Seen] = {gpu: Seen() for gpu in gpus}
        self.peak_mib = peak_mib
        self.shrinks = True  # whether its booking may still shrink, as far as that was looked at (shrink.py)
        self.energy_j: float | None = None
        self.used_s = 0.0  # since its first use, summed over its GPUs
        self.alone_s: float | None = None  # what it would take alone, as was said before
        self.began_at: float | None = None  # or when this process began to look
        self.done_s = 0.0  # as of `paced_at`, of the seconds that it would take alone (pace.py)
        self.paced_at = 0.0
        self.rate = 1.0  # how fast it is thought to go; 1 alone
        self.rates: dict[GpuId, float] = {}  # the same on each of its GPUs; the slowest counts
        # Its own share of each metric of ACTIVITY_METRICS, integrated, and the seconds for which that was told.
        self.seconds = [0.0] * len(ACTIVITY_METRICS)
        self.totals = [0.0] * len(ACTIVITY_METRICS)

    def begin(self, at: float, done_s: float = 0.0) -> None:
        self.began_at = self.paced_at = at
        self.done_s = done_s

    def done_by(self, at: float, truth: float = 1.0) -> float:
        if self.began_at is None:
            return 0.0
        return self.done_s + min(1.0, self.rate * truth) * max(0.0, at - self.paced_at)

    def go_on_until(self, at: float, truth: float) -> None:
        self.done_s = self.done_by(at, truth)
        self.paced_at = max(at, self.paced_at)

    @property
    def activity(self) -> Activity | None:
        """Its own share, on average over the time since its first use; None before that."""
        found = {
            name: round(total / seconds, 5)
            for name, total, seconds in zip(ACTIVITY_METRICS, self.totals, self.seconds, strict=True)
            if seconds > 0
        }
        return Activity(**found) if found else None

    def go_on_from(
        self, energy_j: float | None, activity: Activity | None, used_s: float, alone: Alone | None = None
    ) -> None:
        """What an earlier life of the daemon saw of it; what was seen in this one goes on top."""
        if used_s <= self.used_s:
            return
        if alone is not None:
            for seen in self.on.values():
                seen.solo.start_from(alone.demand)
        self.used_s, self.energy_j = used_s, energy_j
        for place, value in enumerate(asdict(activity or Activity()).values()):
            self.seconds[place] = 0.0 if value is None else used_s
            self.totals[place] = 0.0 if value is None else value * used_s


class Member(Record, frozen=True):
    """One attempt on one GPU, and what was seen of it there."""

    key: AttemptKey
    track: Track
    seen: Seen


class Members:
    """Who was on a GPU when a sample was taken."""

    __slots__ = ("foreign", "nobody", "present", "resting", "shares")

    def __init__(self, present: list[Member], resting: list[Member], *, foreign: bool) -> None:
        self.present = present  # they hold memory there
        self.resting = resting  # they did before, and hold none now
        self.foreign = foreign
        self.nobody = not present and not foreign
        self.shares: list[float] | None = None  # of those present, where that does not change with every sample


class Hour:
    """Sums of what a GPU did within an hour, as far as it was watched (model.GpuUsage)."""

    __slots__ = ("energy_j", "guessed_s", "held_s", "idle_j", "shared_s", "sm_s", "tasks_j", "watched_s")

    def __init__(self) -> None:
        self.watched_s = self.held_s = self.shared_s = self.sm_s = 0.0
        self.energy_j = self.idle_j = self.tasks_j = self.guessed_s = 0.0


class Live:
    """Of one GPU. `since` is when a task last came to it or left it: older samples tell of others."""

    __slots__ = (
        "background",
        "company",
        "empty_for",
        "empty_w",
        "held",
        "held_of",
        "left_at",
        "left_over",
        "look",
        "lowest_w",
        "members",
        "recent_w",
        "shown",
        "since",
        "truth",
        "window",
    )

    def __init__(self, length_s: float) -> None:
        self.window = Window(length_s)
        self.look: GpuSample | None = None  # the newest that tells of memory: a sample, or a memory sample between two
        self.held: dict[AttemptKey, int | None] = {}  # MiB of each attempt among `held_of`
        self.held_of: tuple[ProcessUse, ...] | None = None
        self.shown: list[TaskId] = []  # the tasks whose processes `look` shows
        self.members: list[Member] | None = None  # those on it, once somebody has asked; None when they have changed
        self.company: Members | None = None  # among `members`, as the newest sample told; None where it must be asked
        self.since = 0.0
        self.truth = 1.0  # how much of the activity that was predicted for those on it is seen (pace.py)
        self.left_at = 0.0  # when a task last left it
        self.left_over: dict[AttemptKey, float] = {}  # those that left while above their booking, and when
        self.background = Guess()  # of the foreign processes on it
        self.recent_w: deque[float] = deque(maxlen=POWER_SAMPLES)
        self.empty_for = 0  # so many of the last readings of power in a row were with nobody on it
        self.lowest_w: float | None = None  # the lowest mean of those, whoever was on it
        self.empty_w: float | None = None  # the lowest single one with nobody on it: counts until there is a mean
