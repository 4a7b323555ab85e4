"""Who may use the GPU's memory next. Pure: no processes, no clock.

Room is kept for what a config is guessed to take, with a margin, since the guess is rough; how large it must be is
learned from the runs of its family. One that does not fit lets smaller ones pass, so that the card stays full; but only
so often, so that the large ones do run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

MARGIN = 1.15  # until there is something to learn from
LEAST, MOST = 0.5, 2.0  # learned margins
LEARN_FROM = 30  # runs of a family
REMEMBER = 400
KEEP_OUT = 0.25  # so many of them may take more than their room: others take less at the same time
LARGE_MIB = 2048  # below it, the guess says little about a footprint
SLACK_MIB = 1024  # the context, the libraries' kernels and workspaces
CONTEXT_MIB = 700  # what a process holds that has a context and waits
PASSES = 8
LANES = ("light", "heavy")
ALONE_SHARE = 0.6  # of the capacity: what needs more is run alone
HEAVY_SHARE = 0.115  # of the capacity: what needs more is heavy
LEAD = 0.01  # of its runs that a lane may be ahead by while one of the other finds no room


def needed_mib(config: dict[str, Any], margin: float) -> int:
    return int(config.get("guess_mib", 0) * margin) + SLACK_MIB


class Margins:
    """How much room runs need, as a multiple of the guess, family by family."""

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
        return min(MOST, max(LEAST, ratios[int(len(ratios) * (1 - KEEP_OUT))] * 1.05))

    def needed_mib(self, config: dict[str, Any]) -> int:
        return needed_mib(config, self.margin(config["family"]))


class Child(Protocol):
    """A process that measures, as far as its room is concerned."""

    lane: str
    need_mib: float  # at its peak
    held_mib: float  # of it now; 0 where what waits is counted otherwise
    passed: int


Asking = TypeVar("Asking", bound=Child)


def admit(waiting: Sequence[Asking], free_mib: float) -> list[Asking]:
    """Those of `waiting`, in their order, that may rise to their peak now. Counts how often others were passed."""
    admitted: list[Asking] = []
    passed: list[Asking] = []
    for child in waiting:
        rise_mib = child.need_mib - child.held_mib
        if rise_mib <= free_mib:
            admitted.append(child)
            free_mib -= rise_mib
            for other in passed:
                other.passed += 1
        elif child.passed >= PASSES:
            break
        else:
            passed.append(child)
    return admitted


class Lanes:
    """What waits, in two lanes: light runs and heavy ones. Both have all of the card.

    In one lane a heavy run would wait until the card is nearly empty, and all behind it too; had each lane a part of
    the card, much of it would stand unused. Here the lane that is behind chooses first, and the other takes what is
    left. Where one of the lane behind finds no room and the other is ahead by LEAD, that one stands back until it has.
    So both come to their end together, and an early stop leaves a fair sample.

    Nobody waits for ever: what needs more than ALONE_SHARE is in no lane, one that was passed often holds up its lane,
    and with it in time the other; then all that run come to an end.

    `begun` says of each lane how many have begun, and have no room yet.
    """

    def __init__(self, queue: Sequence[dict[str, Any]], capacity_mib: float) -> None:
        self.capacity_mib = capacity_mib
        self.waiting: dict[str, deque[dict[str, Any]]] = {lane: deque() for lane in LANES}
        for config in queue:
            is_heavy = needed_mib(config, MARGIN) > capacity_mib * HEAVY_SHARE
            self.waiting["heavy" if is_heavy else "light"].append(config)
        self.totals = {lane: len(waiting) for lane, waiting in self.waiting.items()}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def take(self, begun: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
        """The next to begin: of the lane that has fewer who have; of the one that is behind where they have as many."""
        lanes = [lane for lane in LANES if self.waiting[lane]]
        lane = min(lanes, key=lambda lane: (begun[lane], self.done(lane, begun)))
        return lane, self.waiting[lane].popleft()

    def put_back(self, lane: str, config: dict[str, Any]) -> None:
        """One that had begun, and is to begin again."""
        self.waiting[lane].appendleft(config)

    def admit(self, waiting: Sequence[Asking], used_mib: float, begun: Mapping[str, int]) -> list[Asking]:
        """Those of `waiting` that may have their room now. `used_mib`: the room that others have."""
        behind, ahead = sorted(LANES, key=lambda lane: self.done(lane, begun))
        free_mib = self.capacity_mib - used_mib
        asking = [child for child in waiting if child.lane == behind]
        admitted = admit(asking, free_mib)
        if len(admitted) < len(asking) and self.done(ahead, begun) - self.done(behind, begun) > LEAD:
            return admitted
        free_mib -= sum(child.need_mib for child in admitted)
        return admitted + admit([child for child in waiting if child.lane == ahead], free_mib)

    def done(self, lane: str, begun: Mapping[str, int]) -> float:
        """The share of the lane that has had its room."""
        return 1 - (len(self.waiting[lane]) + begun[lane]) / self.totals[lane] if self.totals[lane] else 1.0


def admit_to_turns(
    waiting: Sequence[Asking], running: Sequence[Child], resting: Sequence[Child], free_mib: float
) -> list[Asking]:
    """Those of `waiting` that may train now, where each is to train once more while the others rest.

    One at rest holds less than at its peak, so room for the highest peak must stay. `free_mib`: what nobody holds.
    The first may train in any case when nobody else does or rests.
    """
    rises_mib = [child.need_mib - child.held_mib for child in running]
    peak_mib = max((child.need_mib - child.held_mib for child in resting), default=0.0)
    room_mib = free_mib - sum(rises_mib) - peak_mib
    if waiting and not running and not resting:
        room_mib = max(room_mib, waiting[0].need_mib - waiting[0].held_mib)
    return admit(waiting, room_mib)
