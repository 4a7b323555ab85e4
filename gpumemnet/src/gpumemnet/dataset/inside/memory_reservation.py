"""Which run may use GPU memory next. Pure: no processes, no clock.

A run reserves the generator's rough estimate with a margin, which is learned from the runs of its family. A run that
does not fit lets smaller ones pass, so that the GPU stays full; but only PASSES times, so that large runs do start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

MARGIN = 1.15  # until there are runs to learn from
LEAST, MOST = 0.5, 2.0  # learned margins
LEARN_FROM = 30  # runs of a family
REMEMBER = 400
EXCEEDING_SHARE = 0.25  # of runs that may exceed their reservation: others use less at the same time
LARGE_MIB = 2048  # below it the rough estimate says little about a footprint
SLACK_MIB = 1024  # context, kernels and workspaces of the libraries
CONTEXT_MIB = 700  # of a process that has a context and waits
PASSES = 8
QUEUES = ("light", "heavy")
ALONE_SHARE = 0.6  # of the capacity: a run that needs more is run alone
HEAVY_SHARE = 0.115  # of the capacity: a run that needs more is heavy
LEAD = 0.01  # share of its runs by which a queue may be ahead while a run of the other one does not fit


def needed_mib(config: dict[str, Any], margin: float) -> int:
    return int(config.get("guess_mib", 0) * margin) + SLACK_MIB


class Margins:
    """How much memory runs need, as a multiple of the rough estimate, for each family."""

    def __init__(self) -> None:
        self.ratios: dict[str, deque[float]] = {}

    def learn(self, config: dict[str, Any], footprint_mib: float) -> None:
        if config.get("guess_mib", 0) >= LARGE_MIB:
            ratios = self.ratios.setdefault(config["family"], deque(maxlen=REMEMBER))
            ratios.append((footprint_mib - SLACK_MIB) / config["guess_mib"])

    def margin(self, family: str) -> float:
        ratios = sorted(self.ratios.get(family, ()))
        if len(ratios) < LEARN_FROM:
            return MARGIN
        return min(MOST, max(LEAST, ratios[int(len(ratios) * (1 - EXCEEDING_SHARE))] * 1.05))

    def needed_mib(self, config: dict[str, Any]) -> int:
        return needed_mib(config, self.margin(config["family"]))


class Reserving(Protocol):
    """A worker, as far as memory is concerned."""

    queue: str
    need_mib: float  # at its peak
    held_mib: float  # of that now; 0 if waiting runs are counted elsewhere
    times_passed: int


Asking = TypeVar("Asking", bound=Reserving)


def admit(waiting: Sequence[Asking], free_mib: float) -> list[Asking]:
    """Those of `waiting`, in their order, that may use their peak now. Counts how often others were passed."""
    admitted: list[Asking] = []
    passed: list[Asking] = []
    for worker in waiting:
        rise_mib = worker.need_mib - worker.held_mib
        if rise_mib <= free_mib:
            admitted.append(worker)
            free_mib -= rise_mib
            for other in passed:
                other.times_passed += 1
        elif worker.times_passed >= PASSES:
            break
        else:
            passed.append(worker)
    return admitted


class Queues:
    """Two queues of configs, light runs and heavy ones; each may use the whole GPU.

    In one queue a heavy run would wait until the GPU is nearly empty, and everything behind it too. If each queue had
    a part of the GPU, much of it would be unused. Here the queue that is behind chooses first, and the other one uses
    the rest. If a run of the queue that is behind does not fit and the other queue is ahead by LEAD, the other queue
    waits. So both end at the same time, and a run that stops early leaves a fair sample.

    No run waits forever: a run that needs more than ALONE_SHARE is in no queue. A run that was passed PASSES times
    blocks its queue, and in time the other one, until all running ones have ended.

    `begun`: for each queue, workers that have started and have no reservation yet.
    """

    def __init__(
        self, configs: Sequence[dict[str, Any]], capacity_mib: float, heavy_share: float = HEAVY_SHARE
    ) -> None:
        self.capacity_mib = capacity_mib
        self.waiting: dict[str, deque[dict[str, Any]]] = {queue: deque() for queue in QUEUES}
        for config in configs:
            is_heavy = needed_mib(config, MARGIN) > capacity_mib * heavy_share
            self.waiting["heavy" if is_heavy else "light"].append(config)
        self.totals = {queue: len(waiting) for queue, waiting in self.waiting.items()}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def take(self, begun: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
        """The next config: from the queue with fewer begun workers, else from the one that is behind."""
        queues = [queue for queue in QUEUES if self.waiting[queue]]
        queue = min(queues, key=lambda queue: (begun[queue], self.done(queue, begun)))
        return queue, self.waiting[queue].popleft()

    def put_back(self, queue: str, config: dict[str, Any]) -> None:
        """A config whose worker was ended before it had a reservation."""
        self.waiting[queue].appendleft(config)

    def admit(self, waiting: Sequence[Asking], used_mib: float, begun: Mapping[str, int]) -> list[Asking]:
        """Those of `waiting` that get a reservation now. `used_mib`: reservations of the others."""
        behind, ahead = sorted(QUEUES, key=lambda queue: self.done(queue, begun))
        free_mib = self.capacity_mib - used_mib
        asking = [worker for worker in waiting if worker.queue == behind]
        admitted = admit(asking, free_mib)
        if len(admitted) < len(asking) and self.done(ahead, begun) - self.done(behind, begun) > LEAD:
            return admitted
        free_mib -= sum(worker.need_mib for worker in admitted)
        return admitted + admit([worker for worker in waiting if worker.queue == ahead], free_mib)

    def done(self, queue: str, begun: Mapping[str, int]) -> float:
        """The share of the queue that has had a reservation."""
        left = len(self.waiting[queue]) + begun[queue]
        return 1 - left / self.totals[queue] if self.totals[queue] else 1.0


def admit_to_turns(
    waiting: Sequence[Asking], running: Sequence[Reserving], resting: Sequence[Reserving], free_mib: float
) -> list[Asking]:
    """Those of `waiting` that may train now, if each is to train once more while the others rest.

    A resting worker holds less than at its peak, so memory for the highest peak must stay free. `free_mib`: memory that
    no worker holds. The first may train in any case if no other one trains or rests.
    """
    rises_mib = [worker.need_mib - worker.held_mib for worker in running]
    peak_mib = max((worker.need_mib - worker.held_mib for worker in resting), default=0.0)
    room_mib = free_mib - sum(rises_mib) - peak_mib
    if waiting and not running and not resting:
        room_mib = max(room_mib, waiting[0].need_mib - waiting[0].held_mib)
    return admit(waiting, room_mib)
