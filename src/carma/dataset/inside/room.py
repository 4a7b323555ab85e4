"""Who may use the GPU's memory next. Pure: no processes, no clock.

Room is kept for what a config is guessed to take, with a margin, since the guess is rough; how large it must be is
learned from the runs of its family. One that does not fit lets smaller ones pass, so that the card stays full; but only
so often, so that the large ones do run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
ALONE_SHARE = 0.85  # of the capacity: beside the contexts of those that wait, more may not fit
LOOK_AHEAD = 300  # configs that are tried for a place in a group


class Asking(Protocol):
    need_mib: int
    passed: int


Child = TypeVar("Child", bound=Asking)


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


def admit(waiting: Sequence[Child], used_mib: float, capacity_mib: float) -> list[Child]:
    """Those of `waiting`, in their order, that may start now. Counts how often others were passed."""
    admitted: list[Child] = []
    passed: list[Child] = []
    for child in waiting:
        if not used_mib or used_mib + child.need_mib <= capacity_mib:  # an empty card takes any
            admitted.append(child)
            used_mib += child.need_mib
            for other in passed:
                other.passed += 1
        elif child.passed >= PASSES:
            break
        else:
            passed.append(child)
    return admitted


def choose_group(needs_mib: Sequence[int], most: int, capacity_mib: float) -> list[int]:
    """Places of those that fit together. The first is always among them: nobody waits for ever."""
    chosen: list[int] = []
    used_mib = 0
    for place, need_mib in enumerate(needs_mib):
        if len(chosen) < most and (not chosen or used_mib + need_mib <= capacity_mib):
            chosen.append(place)
            used_mib += need_mib
    return chosen
