"""The end of an attempt, as the event that tells it: with all that was seen of the attempt, and of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.events import AttemptEnded
from carma.core.model.outcome import Outcome, OutOfMemory
from carma.core.model.values import AttemptKey
from carma.core.state import State
from carma.core.telemetry.observation import ending_facts


def ended(
    state: State, key: AttemptKey, outcome: Outcome, at: float, guilty: Sequence[AttemptKey] = ()
) -> AttemptEnded:
    """The event with what was seen of the attempt. `guilty` are found to have run out of their own booking just now,
    which no sample may have shown."""
    seen = ending_facts(state, key, at)
    peak_mib = seen.peak_mib
    if isinstance(outcome, OutOfMemory) and outcome.peak_mib is not None:
        peak_mib = max(peak_mib or 0, outcome.peak_mib)
    over: tuple[AttemptKey, ...] = ()
    if isinstance(outcome, OutOfMemory) and outcome.where == "gpu":
        near = (other for other in guilty if other != key and _share_a_gpu(state, key, other))
        over = tuple(dict.fromkeys((*seen.over, *near)))
    return AttemptEnded(at, key, outcome, peak_mib, seen.energy_j, over, seen.activity, seen.used_s, seen.alone)


def _share_a_gpu(state: State, one: AttemptKey, other: AttemptKey) -> bool:
    return any(one in held and other in held for held in state.on_gpu.values())
