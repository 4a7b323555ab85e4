"""Who may use the GPU's memory next. Pure: no processes, no clock.

Room is kept for what a config is guessed to take, with a margin, since the guess is rough; how large it must be is
learned from the runs of its family.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

MARGIN = 1.15  # until there is something to learn from
LEAST, MOST = 0.5, 2.0  # learned margins
LEARN_FROM = 30  # runs of a family
REMEMBER = 400
KEEP_OUT = 0.25  # so many of them may take more than their room: others take less at the same time
LARGE_MIB = 2048  # below it, the guess says little about a footprint
SLACK_MIB = 1024  # the context, the libraries' kernels and workspaces
HEAVY_SHARE = 0.1  # of the capacity: what is guessed to take more goes in the heavy lane
LANE_AHEAD = 40  # runs of a lane that are tried for a place
ALONE_SHARE = 0.6  # of the capacity: what needs more is run alone
LOOK_AHEAD = 300  # configs that are tried for a place in a group


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
        return int(config.get("guess_mib", 0) * self.margin(config["family"])) + SLACK_MIB


class Lanes:
    """What waits, in two lanes: light runs and heavy ones, each with a part of the card of its own.

    In one lane a heavy run would wait until the card is nearly empty, and all behind it too. The parts shift towards the
    lane that is behind, so that both come to their end together and an early stop leaves a fair sample.
    """

    def __init__(self, queue: Sequence[dict[str, Any]], capacity_mib: float) -> None:
        self.capacity_mib = capacity_mib
        heavy_mib = capacity_mib * HEAVY_SHARE
        self.waiting = {
            "light": deque(config for config in queue if config.get("guess_mib", 0) <= heavy_mib),
            "heavy": deque(config for config in queue if config.get("guess_mib", 0) > heavy_mib),
        }
        self.totals = {lane: len(waiting) for lane, waiting in self.waiting.items()}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def next(self, used_mib: dict[str, float], margins: Margins) -> tuple[str, dict[str, Any], int] | None:
        """The lane, the run and the room it is given; None while nothing fits."""
        behind = sorted(self.waiting, key=self.done)
        for lane in behind:
            limit_mib = self.part(lane) - used_mib[lane]
            free_mib = min(limit_mib, self.capacity_mib - sum(used_mib.values()))
            for place, config in enumerate(islice(self.waiting[lane], LANE_AHEAD)):
                need_mib = margins.needed_mib(config)
                if need_mib <= free_mib or not used_mib[lane]:
                    if need_mib > self.capacity_mib - sum(used_mib.values()):
                        break
                    del self.waiting[lane][place]
                    return lane, config, need_mib
        return None

    def done(self, lane: str) -> float:
        return 1 - len(self.waiting[lane]) / self.totals[lane] if self.totals[lane] else 1.0

    def part(self, lane: str) -> float:
        if not all(self.waiting.values()):
            return self.capacity_mib
        ahead = self.done("light") - self.done("heavy")
        heavy = min(0.8, max(0.35, 0.6 + 4 * ahead))
        return self.capacity_mib * (heavy if lane == "heavy" else 1 - heavy)


def choose_group(needs_mib: Sequence[int], most: int, capacity_mib: float) -> list[int]:
    """Places of those that fit together. The first is always among them: nobody waits for ever."""
    chosen: list[int] = []
    used_mib = 0
    for place, need_mib in enumerate(needs_mib):
        if len(chosen) < most and (not chosen or used_mib + need_mib <= capacity_mib):
            chosen.append(place)
            used_mib += need_mib
    return chosen
