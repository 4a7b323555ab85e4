"""Who may use the GPU's memory next. Pure: no processes, no clock.

Room is kept for what a config is guessed to take, with a margin, since the guess is rough. One that does not fit lets
smaller ones pass, so that the card stays full; but only so often, so that the large ones do run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

MARGIN = 1.3
SLACK_MIB = 1024  # the context, the libraries' kernels and workspaces
CONTEXT_MIB = 700  # what a process holds that has a context and waits
PASSES = 8
ALONE_SHARE = 0.85  # of the capacity: beside the contexts of those that wait, more may not fit
LOOK_AHEAD = 300  # configs that are tried for a place in a group


class Asking(Protocol):
    need_mib: int
    passed: int


Child = TypeVar("Child", bound=Asking)


def needed_mib(config: dict[str, Any]) -> int:
    return int(config.get("guess_mib", 0) * MARGIN) + SLACK_MIB


def wants_all(config: dict[str, Any], capacity_mib: float) -> bool:
    """Whether it is to run with nobody beside it."""
    return needed_mib(config) > capacity_mib * ALONE_SHARE


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


def choose_group(queue: Sequence[dict[str, Any]], most: int, capacity_mib: float) -> list[int]:
    """Places in the queue of those that fit together. The first is always among them: nobody waits for ever."""
    chosen: list[int] = []
    used_mib = 0
    for place, config in enumerate(queue[:LOOK_AHEAD]):
        need_mib = needed_mib(config)
        if len(chosen) < most and (not chosen or used_mib + need_mib <= capacity_mib):
            chosen.append(place)
            used_mib += need_mib
    return chosen
