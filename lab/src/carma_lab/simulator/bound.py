"""The limit: a makespan and a mean completion that no policy can beat in this simulator, whatever it knows beforehand.

Each part is a lower bound by itself; the makespan's bound is the largest of them:

- arrivals: a task ends no sooner than its arrival and its run alone.
- work: all work has to be done, and a GPU does it no faster than the best mix of sets of tasks that fit on it
  (configuration LP; bound_prices.py).
- late: the same for the work that comes from some moment on, counted from that moment; the latest over all moments.
- stages: all of that at once (bound_stages.py).

What makes them too optimistic: tasks can be stopped, moved and cut to pieces at will, the GPUs of a task need not be
free together, and memory may still be warming up. They hold for runs in which every task succeeds, without noise (with
it the truth may be faster than the model), and in which an attempt begins from nothing.

With a slowdown cap the makespan's bound holds for runs in which no task takes longer than cap times its run alone, as
the figures of a run have it (`slowdown_max`). A task may be slower for a while if it is faster at other times, as
policy goodput allows; so sets are not judged one by one. What the cap leaves to each kind of task is a number of
seconds beside others (bound_sets.py has why, bound_prices.py and bound_stages.py have how). Tasks of a kind may lend
it to each other, which is optimistic. The mean completion knows nothing of a cap: its proof takes each task to be
worked on at no less than nothing at any time, and after fees that is not so.
"""

from __future__ import annotations

import numpy as np

from carma.core.model.values import Record
from carma.errors import Usage
from carma.traces import Trace
from carma_lab.simulator.bound_completion import completion_mean_s
from carma_lab.simulator.bound_prices import Priced, prices
from carma_lab.simulator.bound_sets import Floats, Mechanism, Sets, Work, sets_of, work_of
from carma_lab.simulator.bound_stages import earliest_end_s, stages_of
from carma_lab.simulator.simulated_cards import Card
from carma_lab.simulator.simulated_server import plan_of

LAUNCH_S = 0.5  # as the simulator has it: from a placement to the process
MOMENTS = 6  # from which on the work is priced
STAGES = 32


class Bound(Record, frozen=True, kw_only=True):
    """Seconds, as in the figures of a run: the makespan from the first arrival on, completion from each arrival on."""

    makespan_s: float  # the largest of the four that follow
    arrivals_s: float
    work_s: float
    late_s: float
    stages_s: float
    completion_mean_s: float
    alone_mean_s: float  # the mean completion if nobody ever waited or shared
    counted: float  # the share of the work that was reckoned with; below 1 where there are too many kinds of tasks


def bound(
    trace: Trace, card: Card, gpus: int, mechanism: Mechanism = "mps", tasks_per_gpu: int = 4,
    slowdown_cap: float | None = None, launch_s: float = LAUNCH_S,
) -> Bound:  # fmt: skip
    """Usage where a task could never run there. Seconds of work, also for a trace of 100,000 tasks. `slowdown_cap`:
    nobody's whole run takes longer than so many times its run alone; None: however long."""
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
        raise Usage(f"a slowdown cap of {cap:g}", "Give a number of at least 1, or none: nobody is faster than alone.")
    if not trace.tasks:
        raise Usage(f"{trace.name}: no task in it", "There is no bound of nothing: give a trace with tasks.")
    for place, task in enumerate(trace.tasks, 1):
        if task.gpus > gpus or task.memory_mib > card.memory_mib:
            raise Usage(
                f"task {place} of {trace.name} ({task.name}) wants {task.memory_mib:,} MiB on {task.gpus} GPUs; there "
                f"are {gpus} with {card.memory_mib:,} MiB",
                "It could never run there: take more or larger GPUs, or cut it out of the trace.",
            )


def _alone(trace: Trace, launch_s: float) -> tuple[Floats, Floats]:
    """Each task's arrival after the first, and its completion if it neither waited nor shared."""
    first_s = trace.tasks[0].arrival_s
    arrival_s = np.array([task.arrival_s - first_s for task in trace.tasks])
    return arrival_s, np.array([launch_s + task.start_s + plan_of(task)[0][0] for task in trace.tasks])


def _priced(sets: Sets, work: Work, cap: float | None = None) -> tuple[list[Priced], list[int]]:
    """Prices that are best for all work, and for what comes from some later moments on; and the sets that do it."""
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
    """The latest end over all moments, and the moment: what comes from then on has to be done after it."""
    ends: list[tuple[float, float]] = []
    for each in priced:
        to_do = each.least_gpu_s(work, cap)[::-1].cumsum()[::-1] / gpus
        place = int(np.argmax(work.release_s + to_do))
        ends.append((float(work.release_s[place] + to_do[place]), float(work.release_s[place])))
    return max(ends)


def _cuts(release_s: Floats, moment_s: float) -> Floats:
    """Where stages begin: at releases, evenly over time; all of them where there are few."""
    known = np.unique(release_s)
    if len(known) <= STAGES:
        return known
    even = known[np.searchsorted(known, np.linspace(known[0], known[-1], STAGES))]
    return np.unique(np.append(even, moment_s))
