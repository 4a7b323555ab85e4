"""Phrases for the sharing mechanism and the memory guards of an attempt, for stories and `carma show`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from carma.core.model.units import show_mib
from carma.core.model.values import Guard
from carma.wire.api_types import GuardView

_MECHANISMS = {"timeslice": "in time slices", "mps": "under MPS", "mig": "on a MIG instance"}
_RUNGS = {
    "mps": "MPS's memory limit",
    "cgroup": "the cgroup's GPU memory limit",
    "framework": "its framework's own limit",
    "watchdog": "the watchdog",
}
_EACH = re.compile(r", (?:for )?each process$")


def mechanism_phrase(mechanism: str) -> str:
    """`under MPS`."""
    return _MECHANISMS.get(mechanism, f"by {mechanism}")


def guards_phrase(guards: Sequence[Guard | GuardView]) -> str:
    """`limited to 8.0 GiB a process by MPS's memory limit, and by PyTorch's own where it uses that; the watchdog
    checks it too`."""
    firm = [guard for guard in guards if guard.rung != "watchdog"]
    watched = [guard for guard in guards if guard.rung == "watchdog"]
    if not firm:
        if not watched:
            return "no memory limit"
        return (
            f"no memory limit; the watchdog stops it above {show_mib(watched[0].limit_mib)} if others need the memory"
        )
    limits = _limits(firm)
    parts: list[str] = []
    known = ""
    for at, by in limits:
        parts.append(f"by {by}" if at == known else f"to {at} by {by}")
        known = at
    checked = "; the watchdog checks it too" if watched else ""
    return f"limited {', and '.join(parts)}{checked}"


def _limits(firm: Sequence[Guard | GuardView]) -> list[tuple[str, str]]:
    """One per guard: `8.0 GiB a process`, and what limits it. The limits of all installed frameworks are set, because
    the frameworks that the task will use are unknown; equal limits are reported together."""
    names: dict[str, list[str]] = {}
    found: list[tuple[str, str]] = []
    for guard in firm:
        how = guard.how or _RUNGS.get(guard.rung, guard.rung)
        by, at = _EACH.sub("", how), show_mib(guard.limit_mib)
        if by == how:
            found.append((at, how))
        elif guard.rung != "framework":
            found.append((f"{at} a process", by))
        else:
            names.setdefault(f"{at} a process", []).append(f"{by.split()[0]}'s")  # without its version
    return [*found, *((at, _own(of_size)) for at, of_size in names.items())]


def _own(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} own where it uses that"
    return f"{', '.join(names[:-1])} and {names[-1]} own where it uses them"
