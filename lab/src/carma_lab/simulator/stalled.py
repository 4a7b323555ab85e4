"""A run that cannot go on: whom nothing starts, and why, in the core's own words."""

from __future__ import annotations

from carma.core.model.units import show_count
from carma.core.scheduling.queue_order import in_order, waiting
from carma.core.state import State
from carma.errors import Refused

NAMED = 5  # tasks


def stalled(state: State, now: float) -> Refused:
    """Nobody runs, all have arrived, and the line is not empty: the reason is that of the first in it."""
    line = list(in_order(state, now))
    named = ", ".join(map(str, line[:NAMED])) + (", …" if len(line) > NAMED else "")
    count = f"{show_count(len(line), 'task')} {'waits' if len(line) == 1 else 'wait'} ({named})"
    reason = waiting(state, now, line[:1])[line[0]]
    return Refused(
        f"nothing runs and nothing comes any more, and {count}. Task {line[0]}: {reason.sentence} ({reason.code})",
        "The policy or the settings start it on no GPU, not even on an idle one.",
    )
