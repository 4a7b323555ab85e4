"""How an attempt shares its GPUs, and what holds it, in words: the same in a story and on a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from carma.core.units import show_mib

_MECHANISMS = {"timeslice": "in time slices", "mps": "under MPS", "mig": "on a MIG instance"}
_RUNGS = {
    "mps": "MPS's memory limit",
    "cgroup": "the cgroup's GPU memory limit",
    "framework": "its framework's own limit",
    "watchdog": "the watchdog",
}


class Rung(Protocol):
    """What both the core's Guard and the API's GuardView have."""

    @property
    def rung(self) -> str: ...

    @property
    def limit_mib(self) -> int: ...

    @property
    def how(self) -> str: ...


def shared(mechanism: str) -> str:
    """`under MPS`."""
    return _MECHANISMS.get(mechanism, f"by {mechanism}")


def held(guards: Sequence[Rung]) -> str:
    """`held at 8.0 GiB by MPS's memory limit, and by PyTorch's own; the watchdog behind them`."""
    firm = [guard for guard in guards if guard.rung != "watchdog"]
    watched = [guard for guard in guards if guard.rung == "watchdog"]
    if not firm:
        if not watched:
            return "nothing holds it"
        return f"no limit holds it; the watchdog stops it above {show_mib(watched[0].limit_mib)} if others need that"
    parts: list[str] = []
    known_mib: int | None = None
    for guard in firm:
        at = "" if guard.limit_mib == known_mib else f"at {show_mib(guard.limit_mib)} "
        parts.append(f"{at}by {guard.how or _RUNGS.get(guard.rung, guard.rung)}")
        known_mib = guard.limit_mib
    behind = f"; the watchdog behind {'it' if len(firm) == 1 else 'them'}" if watched else ""
    return f"held {', and '.join(parts)}{behind}"
