"""Progress of a run, and the error for a run that cannot continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from carma.core.model.events import AnyEvent
from carma.core.model.units import show_count
from carma.core.scheduling.explanation import waiting
from carma.core.scheduling.queue_order import queued_ids
from carma.core.state import State
from carma.errors import Refused

if TYPE_CHECKING:
    from carma_lab.simulator.simulation import Simulation

EVERY = 256  # events: some hundredths of a second
Tell = Callable[[int, int, float], None]  # tasks that have ended, all of them, simulated seconds


def followed(made: Simulation, tell: Tell) -> Iterator[AnyEvent]:
    """The events of that run; `tell` is called now and then, and at the end."""
    total = len(made.trace.tasks)
    for number, event in enumerate(made.events(), 1):
        yield event
        if number % EVERY == 0:
            tell(len(made.runs), total, made.now)
    tell(len(made.runs), total, made.now)


NAMED = 5  # tasks


def stalled(state: State, now: float) -> Refused:
    """Nobody runs, all have arrived, and the line is not empty: the reason is that of the first in it."""
    line = list(queued_ids(state, now))
    named = ", ".join(map(str, line[:NAMED])) + (", …" if len(line) > NAMED else "")
    count = f"{show_count(len(line), 'task')} {'waits' if len(line) == 1 else 'wait'} ({named})"
    reason = waiting(state, now, line[:1])[line[0]]
    return Refused(
        f"nothing runs and nothing comes any more, and {count}. Task {line[0]}: {reason.sentence} ({reason.code})",
        "The policy or the settings start it on no GPU, not even on an idle one.",
    )
