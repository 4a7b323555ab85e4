"""Decides which training run may use GPU memory next. Pure: no processes, no clock.

A run reserves the generator's rough estimate times a margin, which is learned from the finished runs of its family.
Later runs that fit may overtake a run that does not fit, so that the GPU stays full; but at most MAX_TIMES_PASSED
times, so that large runs start too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

MARGIN = 1.15  # until LEARN_FROM runs of the family are finished
MIN_MARGIN, MAX_MARGIN = 0.5, 2.0  # of learned margins
LEARN_FROM = 30  # runs
MAX_REMEMBERED = 400  # runs of a family
EXCEEDING_SHARE = 0.25  # share of runs that may exceed their reservation, because others use less than theirs
LARGE_MIB = 2048  # a smaller rough estimate says little about the footprint, so the margin is not learned from it
SLACK_MIB = 1024  # context, kernels and workspaces of the libraries
CONTEXT_MIB = 700  # of a process that has a context and waits
MAX_TIMES_PASSED = 8
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
            ratios = self.ratios.setdefault(config["family"], deque(maxlen=MAX_REMEMBERED))
            ratios.append((footprint_mib - SLACK_MIB) / config["guess_mib"])

    def margin(self, family: str) -> float:
        ratios = sorted(self.ratios.get(family, ()))
        if len(ratios) < LEARN_FROM:
            return MARGIN
        return min(MAX_MARGIN, max(MIN_MARGIN, ratios[int(len(ratios) * (1 - EXCEEDING_SHARE))] * 1.05))

    def needed_mib(self, config: dict[str, Any]) -> int:
        return needed_mib(config, self.margin(config["family"]))


class Reserving(Protocol):
    """The properties of a worker that concern memory."""

    queue: str
    need_mib: float  # at its peak
    held_mib: float  # part of need_mib that it holds now; 0 where the memory of waiting runs is counted separately
    times_passed: int


AnyReserving = TypeVar("AnyReserving", bound=Reserving)


def admit(waiting: Sequence[AnyReserving], free_mib: float) -> list[AnyReserving]:
    """The workers of `waiting`, in order, whose peak fits now. Increments `times_passed` of the workers that they
    overtake."""
    admitted: list[AnyReserving] = []
    passed: list[AnyReserving] = []
    for worker in waiting:
        rise_mib = worker.need_mib - worker.held_mib
        if rise_mib <= free_mib:
            admitted.append(worker)
            free_mib -= rise_mib
            for other in passed:
                other.times_passed += 1
        elif worker.times_passed >= MAX_TIMES_PASSED:
            break
        else:
            passed.append(worker)
    return admitted


class Queues:
    """Two queues of configs, light runs and heavy ones; each may use the whole GPU.

    In a single queue, a heavy run would wait until the GPU is nearly empty, and all later runs would wait too. If each
    queue had a part of the GPU, much of it would be unused. With two queues, the queue with the smaller share of runs
    done (the queue that is behind) gets memory first, and the other queue gets the rest. If a run of the queue that is
    behind does not fit and the other queue is ahead by LEAD, the other queue waits. So both queues end at the same
    time, and a collection that stops early has a fair sample of both.

    No run waits forever: a run that needs more than ALONE_SHARE is in no queue. A run that was overtaken
    MAX_TIMES_PASSED times blocks its queue, and after some time the other queue, until all running runs have ended.

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
        """The next config, from the queue with fewer begun workers, then from the queue with the smaller share done."""
        queues = [queue for queue in QUEUES if self.waiting[queue]]
        queue = min(queues, key=lambda queue: (begun[queue], self.done(queue, begun)))
        return queue, self.waiting[queue].popleft()

    def put_back(self, queue: str, config: dict[str, Any]) -> None:
        """A config whose worker was ended before it had a reservation."""
        self.waiting[queue].appendleft(config)

    def admit(self, waiting: Sequence[AnyReserving], used_mib: float, begun: Mapping[str, int]) -> list[AnyReserving]:
        """The workers of `waiting` that get a reservation now. `used_mib`: memory that other workers have reserved."""
        behind, ahead = sorted(QUEUES, key=lambda queue: self.done(queue, begun))
        free_mib = self.capacity_mib - used_mib
        first = [worker for worker in waiting if worker.queue == behind]
        admitted = admit(first, free_mib)
        if len(admitted) < len(first) and self.done(ahead, begun) - self.done(behind, begun) > LEAD:
            return admitted
        free_mib -= sum(worker.need_mib for worker in admitted)
        return admitted + admit([worker for worker in waiting if worker.queue == ahead], free_mib)

    def done(self, queue: str, begun: Mapping[str, int]) -> float:
        """The share of the queue's runs that have had a reservation."""
        left = len(self.waiting[queue]) + begun[queue]
        return 1 - left / self.totals[queue] if self.totals[queue] else 1.0


def admit_to_turns(
    waiting: Sequence[AnyReserving], running: Sequence[Reserving], resting: Sequence[Reserving], free_mib: float
) -> list[AnyReserving]:
    """The workers of `waiting` that may train now, when workers take turns: each trains while the others rest.

    A resting worker holds less than its peak and will train again, so memory for the highest peak of a resting worker
    must stay free. `free_mib`: memory that no worker holds. The first worker may always train if no other trains or
    rests.
    """
    rises_mib = [worker.need_mib - worker.held_mib for worker in running]
    peak_mib = max((worker.need_mib - worker.held_mib for worker in resting), default=0.0)
    room_mib = free_mib - sum(rises_mib) - peak_mib
    if waiting and not running and not resting:
        room_mib = max(room_mib, waiting[0].need_mib - waiting[0].held_mib)
    return admit(waiting, room_mib)
