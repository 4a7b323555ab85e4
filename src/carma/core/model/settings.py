"""The rules that decisions follow: each a value with its default, unit and reason. Frozen, and part of the state.

Everything here can be set in the settings file under the same names (`[gate] sm_active = 0.8`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from carma.core.model.values import Booking, Guard, Record, TaskSpec

# Two arrays of the largest size (measured: such a queue takes about 55 MB of memory and 45 MB of disk).
WAITING_LIMIT = 20_000


class Gate(Record, frozen=True, kw_only=True):
    """Caps on what a GPU may already be doing when a task joins it. A missing metric never passes."""

    enabled: Annotated[bool, Meta(description="Whether utilisation is looked at before tasks share a GPU.")] = True
    sm_active: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on SM activity (published: 0.80).")] = 0.80
    sm_occupancy: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on SM occupancy (published: 0.45).")] = 0.45
    dram_active: Annotated[float, Meta(ge=0.0, le=1.0, description="Cap on DRAM activity (published: 0.40).")] = 0.40
    summary: Annotated[
        Literal["risk", "p95", "mean"],
        Meta(description="How a window is summarised: the published risk formula, its 95th percentile, or its mean."),
    ] = "risk"
    combine: Annotated[
        Literal["any", "published"],
        Meta(
            description="any: one cap reached closes the GPU. published: SM activity and one of the other two, "
            "which lets a GPU through at 100 % SM activity."
        ),
    ] = "any"


class WindowRules(Record, frozen=True, kw_only=True):
    length_s: Annotated[float, Meta(gt=0.0, description="How far back a window looks, in seconds.")] = 30.0
    min_samples: Annotated[
        int, Meta(ge=1, description="So many samples since the last task came or went before a GPU is judged.")
    ] = 3
    stale_s: Annotated[
        float, Meta(gt=0.0, description="A newest sample older than this counts as no metrics, in seconds.")
    ] = 15.0


class WarmUp(Record, frozen=True, kw_only=True):
    """A GPU that took a task opens again when the newcomer has settled, not after a fixed sleep."""

    enabled: Annotated[bool, Meta(description="Whether a GPU closes while a newcomer warms up.")] = True
    settle_s: Annotated[
        float, Meta(ge=0.0, description="So long, from its first activity, memory must not have grown, in seconds.")
    ] = 20.0
    growth_mib: Annotated[int, Meta(ge=0, description="Growth below this counts as none, in MiB.")] = 64
    activity_change: Annotated[
        float, Meta(ge=0.0, le=1.0, description="SM activity may move by this share between the halves of the span.")
    ] = 0.15
    idle_s: Annotated[
        float,
        Meta(ge=0.0, description="A newcomer that never touches the GPU stops closing it after this, in seconds."),
    ] = 120.0
    limit_s: Annotated[
        float, Meta(ge=0.0, description="A newcomer that never settles stops closing it after this, in seconds.")
    ] = 600.0


class Memory(Record, frozen=True, kw_only=True):
    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="Who is asked how much memory a task takes, in order; empty: nobody (recovery only, 'OR'). "
            "trace, the trial run, is left out where the GPUs are virtual."
        ),
    ] = ("declared", "history", "trace")
    estimators_at_once: Annotated[
        int,
        Meta(
            ge=1, le=64, description="So many trial runs, or other slow estimates, at the same time; users take turns."
        ),
    ] = 2
    trial_limit_s: Annotated[
        float, Meta(gt=0.0, description="A trial run, or another slow estimate, is ended after this, in seconds.")
    ] = 120.0
    trial_memory_mib: Annotated[
        int, Meta(ge=64, description="A trial run is ended when it takes more of the host's memory than this, in MiB.")
    ] = 8192
    level: Annotated[
        float,
        Meta(ge=0.5, lt=1.0, description="The probability with which the bound of a trial run's estimate is to hold."),
    ] = 0.99
    shrink: Annotated[
        bool,
        Meta(
            description="Whether a booking shrinks to what the task was seen to take, and a margin, once it has "
            "settled. A figure that the user declared stays, and what was booked for one alone on its GPUs."
        ),
    ] = True
    margin_mib: Annotated[int, Meta(ge=0, description="Kept free on a shared GPU beyond what is booked, in MiB.")] = 512
    unknown_mib: Annotated[
        int, Meta(ge=1, description="Room wanted, and booked, for a task of unknown size, in MiB (published: 5120).")
    ] = 5120


class PlacementRules(Record, frozen=True, kw_only=True):
    policy: Annotated[
        str,
        Meta(
            description="Which GPUs: exclusive, round-robin, first-fit, best-fit, magm, lug, goodput, horus, lucid or "
            "a plugin's."
        ),
    ] = "magm"
    slowdown_cap: Annotated[
        float,
        Meta(
            ge=1.0,
            description="goodput: nobody on a shared GPU is predicted to take longer than so many times as alone.",
        ),
    ] = 1.25
    tasks_per_gpu: Annotated[int, Meta(ge=1, description="At most so many tasks on one GPU.")] = 4
    idle_first: Annotated[
        bool, Meta(description="A GPU without any task is taken before one is shared (as published).")
    ] = True
    gpus: Annotated[
        tuple[str, ...], Meta(description="Only these GPUs (UUIDs or indices) take tasks; empty: all.")
    ] = ()


class Sharing(Record, frozen=True, kw_only=True):
    """How tasks share a card, and what keeps each within its booking."""

    mechanism: Annotated[
        Literal["auto", "timeslice", "mps", "mig"],
        Meta(
            description="timeslice: plain processes. mps: under an MPS server of the user's own, which CARMA starts. "
            "mig: only on existing MIG instances, one task on each. auto: mps where it can be had, else timeslice."
        ),
    ] = "auto"
    caps: Annotated[
        bool,
        Meta(
            description="Whether a task is held to its booking by its framework's and MPS's own limits. One of unknown "
            "size, or that ran out of memory before, is held to what was free when it came."
        ),
    ] = True
    context_mib: Annotated[
        int,
        Meta(ge=0, description="What a process takes outside its framework's allocator, in MiB (H200: 760)."),
    ] = 800
    watchdog: Annotated[
        bool,
        Meta(description="Whether a task above its booking is stopped before it takes what its neighbours booked."),
    ] = True
    watch_s: Annotated[
        float,
        Meta(gt=0.0, le=60.0, description="Between two looks at the memory of tasks that no limit holds, in seconds."),
    ] = 0.2

    def watchdog_guards(self, booking: Booking) -> tuple[Guard, ...]:
        """The watchdog's guard on an attempt with this booking; none if the attempt has its GPUs alone."""
        if not self.watchdog or booking.alone:
            return ()
        how = "stopped when it takes what its neighbours have booked"
        return (Guard(rung="watchdog", limit_mib=booking.memory_mib, how=how),)


class QueueRules(Record, frozen=True, kw_only=True):
    backfill_depth: Annotated[
        int, Meta(ge=0, description="So many waiting tasks are looked at behind the first that cannot start.")
    ] = 100
    overtakes: Annotated[
        int, Meta(ge=0, description="So many tasks may go before a waiting one; then its GPUs are kept for it alone.")
    ] = 20
    assumed_runtime_s: Annotated[
        float, Meta(gt=0.0, description="Assumed for a task without time limit or history, in seconds.")
    ] = 3600.0
    misfits: Annotated[
        Literal["wait", "end"],
        Meta(
            description="A waiting task that no longer fits, because GPUs are gone or smaller: wait keeps it until one "
            "that fits is back and holds up nobody; end ends it."
        ),
    ] = "wait"


class FairnessRules(Record, frozen=True, kw_only=True):
    """Whose turn it is among tasks of the same priority: the user's who has had the least for their share. Off: the
    task's that was submitted first."""

    enabled: Annotated[
        bool, Meta(description="Whether users take turns by what they had, and not tasks by when they came.")
    ] = False
    half_life_s: Annotated[
        float, Meta(ge=60.0, description="What a user had so long ago counts half, in seconds (a day).")
    ] = 86_400.0
    memory_weight: Annotated[
        float, Meta(ge=0.0, description="What an hour of a whole card's memory, booked, counts.")
    ] = 1.0
    sm_weight: Annotated[
        float, Meta(ge=0.0, description="What an hour of a whole card's SM activity, as seen, counts.")
    ] = 1.0
    shares: Annotated[
        dict[str, Annotated[float, Meta(gt=0.0)]],
        Meta(description="How much a user is due beside others, by name; default stands for all others, 1 if not set."),
    ] = {}


class QuotaRules(Record, frozen=True, kw_only=True):
    """The most that a user may have at once. A number is for every user; by name, default stands for all others. A user
    who is not named, where there is no default, has no limit except for waiting tasks. Administrators are users too."""

    running: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(description="So many tasks that run.")] = {}
    gpus: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(description="So many GPUs, those of all running tasks added up; a shared GPU counts for each task on it."),
    ] = {}
    memory_share: Annotated[
        dict[str, Annotated[float, Meta(gt=0.0, le=1.0)]],
        Meta(
            description="So much of the server's GPU memory booked, as a share of all of it. A user with no task "
            "running may start one, whatever it is thought to take."
        ),
    ] = {}
    waiting: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(
            description="Maximum number of waiting tasks; more are refused when they are submitted. A user who is not "
            "named may have 20000 unless default says otherwise."
        ),
    ] = field(default_factory=lambda: {"default": WAITING_LIMIT})


class RecoveryRules(Record, frozen=True, kw_only=True):
    mode: Annotated[
        Literal["ladder", "alone"],
        Meta(
            description="How a task comes back. ladder: where what it wanted fits, then with a larger booking, then "
            "alone. alone: at once alone on its GPUs, before all others (as published)."
        ),
    ] = "ladder"
    retries: Annotated[int, Meta(ge=0, description="So often a task comes back after it ran out of GPU memory.")] = 4
    innocent_retries: Annotated[
        int, Meta(ge=0, description="So often it comes back when a neighbour was to blame; not counted in `retries`.")
    ] = 5
    margin_mib: Annotated[
        int, Meta(ge=0, description="Added to the peak and the bytes asked for, for the next booking, in MiB.")
    ] = 1024
    growth: Annotated[float, Meta(ge=1.0, description="The next booking is at least this many times the last.")] = 1.5
    backoff_s: Annotated[
        float, Meta(ge=0.0, description="Wait before the first retry, in seconds; doubles each time.")
    ] = 2.0
    backoff_limit_s: Annotated[float, Meta(ge=0.0, description="Longest wait before a retry, in seconds.")] = 60.0


class Preemption(Record, frozen=True, kw_only=True):
    """Tasks that save on a signal may be asked to, and come back later. No other task is ever asked."""

    enabled: Annotated[
        bool,
        Meta(
            description="Whether CARMA itself asks tasks to save and leave: those of lower priority for the first in "
            "line, and those that the policy wants elsewhere. `carma preempt` works in any case."
        ),
    ] = False
    after_s: Annotated[
        float, Meta(ge=0.0, description="So long a task waits for a GPU before others are asked to leave, in seconds.")
    ] = 60.0
    least_run_s: Annotated[
        float, Meta(ge=0.0, description="So long an attempt has run before CARMA asks it to leave, in seconds.")
    ] = 300.0
    again_s: Annotated[
        float,
        Meta(ge=0.0, description="One that did not leave when it was asked is not asked again for this, in seconds."),
    ] = 900.0


class Stopping(Record, frozen=True, kw_only=True):
    grace_s: Annotated[
        float, Meta(ge=0.0, description="Between SIGTERM and SIGKILL, in seconds, unless the task says otherwise.")
    ] = 10.0

    def grace_of(self, spec: TaskSpec) -> float:
        """Seconds between SIGTERM and SIGKILL: as the task says, otherwise as set for the server."""
        return self.grace_s if spec.grace_s is None else spec.grace_s


class Rules(Record, frozen=True, kw_only=True):
    """All of them."""

    placement: PlacementRules = PlacementRules()
    gate: Gate = Gate()
    window: WindowRules = WindowRules()
    warmup: WarmUp = WarmUp()
    memory: Memory = Memory()
    sharing: Sharing = Sharing()
    queue: QueueRules = QueueRules()
    fairness: FairnessRules = FairnessRules()
    quota: QuotaRules = QuotaRules()
    recovery: RecoveryRules = RecoveryRules()
    preemption: Preemption = Preemption()
    stopping: Stopping = Stopping()


def sampled_every(rules: Rules, step_s: float) -> Rules:
    """The rules for a server that sees a sample only every `step_s` seconds of its clock.

    A window must be able to hold the samples that are wanted of it, and a sample is not stale before the next is due;
    with a slow sampler, or a clock that runs fast, the seconds as set would close every GPU for ever.
    """
    window = replace(
        rules.window,
        length_s=max(rules.window.length_s, (rules.window.min_samples + 1) * step_s),
        stale_s=max(rules.window.stale_s, 3 * step_s),
    )
    return replace(rules, window=window)
