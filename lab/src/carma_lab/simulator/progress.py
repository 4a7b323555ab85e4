"""How far a run is, for whoever waits for it. It only looks on: what is told changes nothing in the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from carma.core.model.events import AnyEvent

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
