"""What is in the heap of a simulation: all that happens by itself at a time that is known."""

from __future__ import annotations

from carma.core.model.outcome import Outcome
from carma.core.model.values import AttemptKey, Record, TaskId
from carma_lab.simulator.simulated_server import Runner


class Arrival(Record, frozen=True):
    place: int  # in the trace


class Started(Record, frozen=True):
    key: AttemptKey


class Begun(Record, frozen=True):
    """Its first use of the GPU."""

    key: AttemptKey


class Saved(Record, frozen=True):
    """One that was asked to save has done so, and leaves."""

    key: AttemptKey


class Thought(Record, frozen=True):
    """The end of an estimate that took its time."""

    task: TaskId


class Look(Record, frozen=True):
    pass


class Wake(Record, frozen=True):
    pass


class Ending(Record, frozen=True):
    """What became of an attempt. It is told with all that was seen of it, once all that was seen is told."""

    key: AttemptKey
    outcome: Outcome


Happening = Arrival | Started | Begun | Saved | Thought | Look | Wake | tuple[Runner, int]
