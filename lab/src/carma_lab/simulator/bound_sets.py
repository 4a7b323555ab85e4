"""Input of the bounds: kinds of tasks, the work of each task, and the sets of tasks that fit on a GPU.

Tasks of one kind have equal memory and demand. Duration and number of GPUs do not affect neighbours, so a long trace
has few kinds.

Only work after the peak of memory counts. Before its peak a task may share a GPU without room for the peak, if a
neighbour ends in time. Leaving that work out is optimistic, which a bound may be: the other tasks are not slower
without it. GPUs that a task requests and leaves idle are left out for the same reason.

A cap on slowdown limits the whole duration of each task to the cap times its duration alone. The start and the growth
to the peak of memory take at least their time alone. After the peak a task therefore uses its GPUs for at most the
remaining duration alone plus (cap - 1) times the WHOLE duration alone; less if it was slowed down before the peak. The
sum over the tasks of a kind is the maximum number of member-seconds that the kind can spend in sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import Mechanism, progress_rates
from carma.traces import Trace
from carma_lab.simulator.simulated_server import plan_of

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

MOST_SETS = 400_000  # 53 kinds, four on a GPU: seconds to list, seconds to solve


class Kind(NamedTuple):
    memory_mib: int
    demand: Demand
    tasks: int  # number of tasks of this kind


class Work(NamedTuple):
    """One entry for each task, in the order of `release_s`. Times are counted from the first arrival."""

    kinds: tuple[Kind, ...]
    kind: Places  # its place in `kinds`
    release_s: Floats  # earliest time of the peak of memory
    seconds: Floats  # alone, from the peak to the end
    whole_s: Floats  # alone, from start to end
    gpus: Floats
    counted: float  # the share of all work; the kinds with the least work are left out if there are too many

    @property
    def gpu_s(self) -> Floats:
        return self.seconds * self.gpus

    def by_kind(self, start: int = 0) -> Floats:
        """GPU-seconds of each kind, of the tasks from position `start` on."""
        return self._summed(self.gpu_s, start)

    def most_gpu_s(self, cap: float) -> Floats:
        """Maximum GPU-seconds of each task after its peak under this cap on slowdown."""
        return self.gpu_s + (cap - 1.0) * self.whole_s * self.gpus

    def most_by_kind(self, cap: float | None, start: int = 0) -> Floats | None:
        """The same for each kind, of the tasks from position `start` on. None: no limit."""
        return None if cap is None else self._summed(self.most_gpu_s(cap), start)

    def _summed(self, values: Floats, start: int) -> Floats:
        made: Floats = np.zeros(len(self.kinds))
        np.add.at(made, self.kind[start:], values[start:])
        return made


def work_of(trace: Trace, tasks_per_gpu: int, launch_s: float) -> Work:
    first = trace.tasks[0].arrival_s
    rows: dict[tuple[int, Demand], list[tuple[float, float, int, float]]] = {}
    for task in trace.tasks:
        plan = plan_of(task)
        done_s, peak_s = plan[0][0], plan[1][0]
        release_s = task.arrival_s - first + launch_s + task.start_s + peak_s
        entry = (release_s, done_s - peak_s, task.working_gpus, task.seconds)
        rows.setdefault((task.memory_mib, task.demand), []).append(entry)
    weights = {key: sum(seconds * gpus for _, seconds, gpus, _ in of_kind) for key, of_kind in rows.items()}
    kept = sorted(rows, key=weights.__getitem__, reverse=True)[: _most_kinds(tasks_per_gpu)]
    entries = sorted((*entry[:3], place, entry[3]) for place, key in enumerate(kept) for entry in rows[key])
    release, seconds, gpus, kind, whole = (np.array(column) for column in zip(*entries, strict=True))
    return Work(
        kinds=tuple(Kind(*key, len(rows[key])) for key in kept),
        kind=kind.astype(np.intp),
        release_s=release.astype(np.float64),
        seconds=seconds.astype(np.float64),
        whole_s=whole.astype(np.float64),
        gpus=gpus.astype(np.float64),
        counted=sum(weights[key] for key in kept) / sum(weights.values()),
    )


def _most_kinds(tasks_per_gpu: int) -> int:
    """The largest number of kinds whose sets can be listed, for tasks of any size."""
    kinds = 1
    while comb(kinds + 1 + tasks_per_gpu, tasks_per_gpu) <= MOST_SETS and kinds < MOST_SETS:
        kinds += 1
    return kinds


class Sets(NamedTuple):
    """One row for each set. `members` are indices of kinds; the index after the last kind fills unused places."""

    members: Places
    rates: Floats
    ranks: Places  # 0 for the first member of a kind in a set, 1 for the second, …

    def worth(self, prices: Floats, fees: Floats | None = None) -> Floats:
        """Earnings of each set per second: a price for the progress of each kind, less a fee for each member."""
        earned: Floats = (_padded(prices)[self.members] * self.rates).sum(axis=1)
        return earned if fees is None else earned - _padded(fees)[self.members].sum(axis=1)

    def possible(self, tasks: Floats) -> NDArray[np.bool_]:
        """Sets that can be formed from this number of tasks of each kind."""
        return np.asarray((self.ranks < np.append(tasks, np.inf)[self.members]).all(axis=1))

    def progress(self, places: Any, kinds: int) -> Floats:
        """Progress of each kind (rows) in a second of each of these sets (columns)."""
        return self._by_kind(places, kinds, self.rates[places])

    def counts(self, places: Any, kinds: int) -> Floats:
        """Members of each kind (rows) in each of these sets (columns)."""
        return self._by_kind(places, kinds, 1.0)

    def _by_kind(self, places: Any, kinds: int, of_members: Floats | float) -> Floats:
        members = self.members[places]
        made = np.zeros((kinds + 1, len(members)))
        np.add.at(made, (members, np.arange(len(members))[:, None]), of_members)
        return made[:-1]


def _padded(values: Floats) -> Floats:
    return np.append(values, 0.0)


def sets_of(kinds: Sequence[Kind], room_mib: int, tasks_per_gpu: int, mechanism: Mechanism) -> Sets:
    found = list(_listed(kinds, room_mib, tasks_per_gpu, mechanism))
    shape = (len(found), tasks_per_gpu)
    sets = Sets(np.full(shape, len(kinds), np.intp), np.zeros(shape), np.zeros(shape, np.intp))
    for place, (members, rates) in enumerate(found):
        size = len(members)
        sets.members[place, :size] = members
        sets.rates[place, :size] = rates
        sets.ranks[place, :size] = [members[:end].count(kind) for end, kind in enumerate(members)]
    return sets


def _listed(
    kinds: Sequence[Kind], room_mib: int, most: int, mechanism: Mechanism
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """All useful sets. A set that does less work than a task alone is useless: its members could run one after the
    other, with as much work done in fewer member-seconds."""
    order = sorted(range(len(kinds)), key=lambda place: kinds[place].memory_mib)
    stack: list[tuple[tuple[int, ...], int, int]] = [((), 0, room_mib)]
    while stack:
        smaller, start, left_mib = stack.pop()
        for at in range(start, len(order)):
            place = order[at]
            if kinds[place].memory_mib > left_mib:
                break
            if smaller.count(place) == kinds[place].tasks:
                continue
            members = (*smaller, place)
            rates = progress_rates([kinds[each].demand for each in members], mechanism)
            if len(members) == 1 or sum(rates) > 1.0:
                yield members, rates
            if len(members) < most:
                stack.append((members, at, left_mib - kinds[place].memory_mib))
