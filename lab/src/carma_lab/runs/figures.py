"""Figures of a run, simulated or real. Pure. None means not known; it is never replaced by 0."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.values import Activity, Demand, Estimate, Record
from carma.demo.figures import percentile


class Ran(Record, frozen=True, kw_only=True):
    """One attempt. None: not known. Figures are equal for all of its GPUs."""

    gpus: tuple[int, ...]
    placed_at: float
    ended_at: float
    outcome: str  # the outcome's kind
    blame: str = ""  # for an OOM: own, neighbour, unknown
    started_at: float | None = None  # its process
    used_s: float | None = None  # from its first use of a GPU to its end
    ramp_s: float | None = None  # from its first use of a GPU to its peak of memory
    memory_mib: int | None = None  # peak on each of its GPUs
    asked_mib: int | None = None  # for an OOM: the allocation that failed
    activity: Activity | None = None  # its share of the activity of each GPU, mean over `used_s`
    energy_j: float | None = None  # of all its GPUs, above idle

    @property
    def first_use(self) -> float:
        """Time of its first use of a GPU; that of its placement if not known."""
        return self.placed_at if self.used_s is None else max(self.placed_at, self.ended_at - self.used_s)


class Asked(Record, frozen=True, kw_only=True):
    """Submission options and estimate of a task: the knowledge of a decision before the task runs."""

    estimate: Estimate | None = None
    estimated_s: float = 0.0  # from its submission to the estimate
    priority: int = 0
    exclusive: bool = False
    time_limit_s: float | None = None


class TaskRun(Record, frozen=True, kw_only=True):
    task: int
    name: str
    user: str
    gpus: int
    arrival_s: float
    ended_s: float
    alone_s: float | None  # duration alone on its GPUs; None: not known, as in most real runs
    attempts: tuple[Ran, ...]
    outcome: str
    asked: Asked | None = None  # None: not recorded
    demand: Demand | None = None  # None: not known, as in real runs
    busy_gpus: int = 0  # number of its GPUs that it works on; 0: all, or not known

    @property
    def ran_s(self) -> float:
        """Duration of the last attempt and of earlier attempts that were preempted."""
        counted = (*(one for one in self.attempts[:-1] if one.outcome == "preempted"), *self.attempts[-1:])
        return sum(one.ended_at - one.placed_at for one in counted)

    @property
    def wait_s(self) -> float:
        """Total time in which it did not run."""
        return self.ended_s - self.arrival_s - sum(one.ended_at - one.placed_at for one in self.attempts)

    @property
    def slowdown(self) -> float | None:
        """None: it did not succeed, or its duration alone is not known."""
        return self.ran_s / self.alone_s if self.alone_s and self.outcome == "succeeded" else None


class Figures(Record, frozen=True, kw_only=True):
    """Times in seconds. Slowdown and run time are means over tasks that succeeded, the others over all tasks.

    None: not known in a real run (not measured, or no duration alone is known).
    """

    makespan_s: float
    wait_mean_s: float
    wait_p95_s: float
    completion_mean_s: float
    completion_p95_s: float
    slowdown_mean: float | None
    slowdown_p95: float | None
    slowdown_max: float | None
    run_mean_s: float
    ooms: int
    innocent_ooms: int
    wasted_gpu_s: float  # in attempts without a result
    energy_j: float | None
    sm_active_mean: float | None
    sm_occupancy_mean: float | None
    dram_active_mean: float | None
    memory_mib_mean: float | None
    power_w_mean: float | None
    tasks: int
    failed: int
    took_s: float | None  # duration of the simulation
    preemptions: int = 0


def figures(runs: Sequence[TaskRun], *, took_s: float | None, **of_gpus: float | None) -> Figures:
    waits = [run.wait_s for run in runs]
    completions = [run.ended_s - run.arrival_s for run in runs]
    good = [run for run in runs if run.outcome == "succeeded"]
    slowdowns = [run.slowdown for run in good if run.slowdown is not None]
    attempts = [one for run in runs for one in run.attempts]
    ooms = [one for one in attempts if one.outcome == "out_of_memory"]
    lost = [one for one in attempts if one.outcome not in ("succeeded", "preempted")]
    return Figures(
        makespan_s=max(run.ended_s for run in runs) - min(run.arrival_s for run in runs),
        wait_mean_s=mean(waits),
        wait_p95_s=quantile(waits, 0.95),
        completion_mean_s=mean(completions),
        completion_p95_s=quantile(completions, 0.95),
        slowdown_mean=mean(slowdowns) if slowdowns else None,
        slowdown_p95=quantile(slowdowns, 0.95) if slowdowns else None,
        slowdown_max=max(slowdowns, default=None),
        run_mean_s=mean([run.ran_s for run in good]),
        ooms=len(ooms),
        innocent_ooms=sum(one.blame == "neighbour" for one in ooms),
        wasted_gpu_s=sum(len(one.gpus) * (one.ended_at - one.placed_at) for one in lost),
        tasks=len(runs),
        failed=len(runs) - len(good),
        took_s=took_s,
        preemptions=sum(one.outcome == "preempted" for one in attempts),
        **of_gpus,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values; 0 without values."""
    return percentile(values, 100.0 * share) if values else 0.0
