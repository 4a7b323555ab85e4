"""What is given for a simulation and would change nothing in it: refused, as figures would be taken for its effect."""

from __future__ import annotations

from collections.abc import Iterable

from carma.errors import BadSettings, Usage
from carma.traces import Trace
from carma_lab.simulator.estimate_sources import COLUMN_OF

_BOOKINGS = "no task is stopped above its booking there, and no booking shrinks"
_SAMPLES = "a sample is left out there while nothing changes"
_MEMORY = "--memory says who is asked there"
# Why a setting has no effect, by its name or its section.
WITHOUT_EFFECT = {
    "placement.policy": "--policy names the policy",
    "sharing.mechanism": "--mechanism says how tasks share",
    "sharing.watchdog": _BOOKINGS,
    "sharing.watch_s": _BOOKINGS,
    "sharing.context_mib": "a trace's memory has all that a task takes in it",
    "memory.shrink": _BOOKINGS,
    "memory.sources": _MEMORY,
    "memory.estimators_at_once": _MEMORY,
    "memory.trial_limit_s": _MEMORY,
    "memory.trial_memory_mib": _MEMORY,
    "memory.level": _MEMORY,
    "window.stale_s": f"no sample is ever stale: {_SAMPLES}",
    "queue.misfits": "a task that no GPU could hold is ended there",
    "quota.waiting": "a trace's tasks all come in; what it refuses, it refuses at the submission",
    "monitor": "it is for the daemon's own look at the GPUs",
    "daemon": "it is for the daemon only",
    "virtual": "--gpus and --gpu say what is simulated",
    "launch": "no process is started there",
}


def check_settings(names: Iterable[str]) -> None:
    for name in names:
        why = WITHOUT_EFFECT.get(name) or WITHOUT_EFFECT.get(name.partition(".")[0])
        if why is not None:
            raise BadSettings(f"{name} has no effect in the simulator: {why}", f"Leave out --set {name}=….")


def check_memory(memory: str, trace: Trace) -> None:
    """A trace without a single estimate by that source would be simulated as if it had said nothing of anybody."""
    column = COLUMN_OF.get(memory)
    if column is not None and all(getattr(row, column) is None for row in trace.tasks):
        raise Usage(
            f"no task of {trace.name} has an estimate by {memory} (column {column})",
            "--memory none is for tasks of which nobody says what they take; --memory measured has the true peaks.",
        )
