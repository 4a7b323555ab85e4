"""Lower bounds of makespan and mean completion for this simulator. They hold for every policy, also a clairvoyant one.

The bound of the makespan is the largest of four lower bounds:

- arrivals: a task ends no sooner than its arrival plus its duration alone.
- work: a GPU does work no faster than with the best mix of sets of tasks that fit on it (configuration LP;
  bound_prices.py).
- late: the work bound of the tasks released from some moment on, counted from that moment; the largest over all
  moments.
- stages: releases and work together (bound_stages.py).

The bounds are optimistic: tasks may be stopped, moved and split, the GPUs of a task need not be free at the same time,
and tasks may still grow towards their peak memory. They hold for runs in which every task succeeds, without noise
(with noise the truth may be faster than the model), and in which every attempt starts from the beginning.

With a slowdown cap, the bound of the makespan holds for runs in which no task takes longer than the cap times its
duration alone (`slowdown_max` in the figures of a run). A task may be slower than the cap for a while if it is faster
at other times, as the policy goodput allows. Sets are therefore not excluded one by one; the cap limits the total
seconds that each kind of task can spend in sets (bound_sets.py explains it, bound_prices.py and bound_stages.py use
it). Tasks of one kind may lend such seconds to each other, which is optimistic. The bound of the mean completion does
not use the cap: its proof needs a speed of at least 0 at any time, which does not hold after fees.
"""

from __future__ import annotations

import numpy as np

from carma.core.model.values import Record
from carma.core.scheduling.sharing_model import Mechanism
from carma.errors import Usage
from carma.traces import Trace
from carma_lab.simulator.bound_completion import completion_mean_s
from carma_lab.simulator.bound_prices import Priced, prices
from carma_lab.simulator.bound_sets import Floats, Sets, Work, sets_of, work_of
from carma_lab.simulator.bound_stages import earliest_end_s, stages_of
from carma_lab.simulator.simulated_cards import Card
from carma_lab.simulator.simulated_server import plan_of

LAUNCH_S = 0.5  # from a placement to the process, as in the simulator
MOMENTS = 6  # start times for which prices are computed
STAGES = 32


class Bound(Record, frozen=True, kw_only=True):
    """Seconds, as in the figures of a run: makespan since the first arrival, completion since the task's arrival."""

    makespan_s: float  # the largest of the next four
    arrivals_s: float
    work_s: float
    late_s: float
    stages_s: float
    completion_mean_s: float
    alone_mean_s: float  # the mean completion without waiting and sharing
    counted: float  # the share of the work that the bound includes; below 1 if there are too many kinds of tasks


def bound(
    trace: Trace, card: Card, gpus: int, mechanism: Mechanism = "mps", tasks_per_gpu: int = 4,
    slowdown_cap: float | None = None, launch_s: float = LAUNCH_S,
) -> Bound:  # fmt: skip
    """Raises Usage if a task fits on none of these GPUs. Takes seconds for a trace of 100,000 tasks. `slowdown_cap`:
    maximum duration of a task relative to its duration alone; None: no limit."""
    _check(trace, card, gpus, slowdown_cap)
    arrival_s, alone_s = _alone(trace, launch_s)
    work = work_of(trace, tasks_per_gpu, launch_s)
    sets = sets_of(work.kinds, card.memory_mib, tasks_per_gpu, mechanism)
    free, used = _priced(sets, work)
    priced = free
    if slowdown_cap is not None:
        capped, used = _priced(sets, work, slowdown_cap)
        priced = capped + free
    arrivals_s = float((arrival_s + alone_s).max())
    late_s, moment_s = _latest(work, priced, gpus, slowdown_cap)
    stages = stages_of(work, _cuts(work.release_s, moment_s), slowdown_cap)
    stages_s = earliest_end_s(sets, stages, gpus, used, max(arrivals_s, late_s))
    work_s = _work_s(work, priced, gpus, slowdown_cap)
    return Bound(
        makespan_s=max(arrivals_s, work_s, late_s, stages_s),
        arrivals_s=arrivals_s,
        work_s=work_s,
        late_s=late_s,
        stages_s=stages_s,
        completion_mean_s=completion_mean_s(work, [each.prices for each in free], gpus, alone_s),
        alone_mean_s=float(alone_s.mean()),
        counted=work.counted,
    )


def _check(trace: Trace, card: Card, gpus: int, cap: float | None = None) -> None:
    if cap is not None and not 1.0 <= cap < np.inf:
        raise Usage(
            f"a slowdown cap of {cap:g}", "Give a number of at least 1, or no cap: no task is faster than alone."
        )
    if not trace.tasks:
        raise Usage(f"{trace.name} has no tasks", "Give a trace with tasks.")
    for place, task in enumerate(trace.tasks, 1):
        if task.gpus > gpus or task.memory_mib > card.memory_mib:
            raise Usage(
                f"task {place} of {trace.name} ({task.name}) needs {task.memory_mib:,} MiB on {task.gpus} GPUs; there "
                f"are {gpus} with {card.memory_mib:,} MiB",
                "It could never run: use more or larger GPUs, or remove the task from the trace.",
            )


def _alone(trace: Trace, launch_s: float) -> tuple[Floats, Floats]:
    """Each task's arrival after the first one, and its completion without waiting and sharing."""
    first_s = trace.tasks[0].arrival_s
    arrival_s = np.array([task.arrival_s - first_s for task in trace.tasks])
    return arrival_s, np.array([launch_s + task.start_s + plan_of(task)[0][0] for task in trace.tasks])


def _priced(sets: Sets, work: Work, cap: float | None = None) -> tuple[list[Priced], list[int]]:
    """Best prices for all work and for the work released from later moments on, and the sets of these solutions."""
    done = work.gpu_s.cumsum() / work.gpu_s.sum()
    starts = sorted({0, *(int(np.searchsorted(done, part / MOMENTS)) for part in range(1, MOMENTS))})
    pool: set[int] = set()
    found = [prices(sets, work.by_kind(start), pool, work.most_by_kind(cap, start)) for start in starts]
    return [each for each, _ in found], sorted({place for _, used in found for place in used})


def _work_s(work: Work, priced: list[Priced], gpus: int, cap: float | None) -> float:
    if cap is None:
        return float(work.release_s[0] + priced[0].prices @ work.by_kind() / gpus)
    return float(work.release_s[0] + max(each.least_gpu_s(work, cap).sum() for each in priced) / gpus)


def _latest(work: Work, priced: list[Priced], gpus: int, cap: float | None) -> tuple[float, float]:
    """The latest end over all moments, and its moment: work released from then on is done after that moment."""
    ends: list[tuple[float, float]] = []
    for each in priced:
        to_do = each.least_gpu_s(work, cap)[::-1].cumsum()[::-1] / gpus
        place = int(np.argmax(work.release_s + to_do))
        ends.append((float(work.release_s[place] + to_do[place]), float(work.release_s[place])))
    return max(ends)


def _cuts(release_s: Floats, moment_s: float) -> Floats:
    """Starts of the stages: releases at even distances in time; all releases if there are few."""
    known = np.unique(release_s)
    if len(known) <= STAGES:
        return known
    even = known[np.searchsorted(known, np.linspace(known[0], known[-1], STAGES))]
    return np.unique(np.append(even, moment_s))
