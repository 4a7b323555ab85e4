"""Entries of a simulation's heap: everything that happens at a known time, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

from carma.core.model.events import AnyEvent
from carma.core.model.outcome import Outcome
from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, Owner, Record, SaveSignal, TaskId, TaskSpec
from carma.core.scheduling.explanation import waiting
from carma.core.scheduling.queue_order import queued_ids
from carma.core.state import State
from carma.errors import Refused
from carma.traces import TraceTask
from carma_lab.runs.figures import Asked
from carma_lab.simulator.simulated_server import RunningTask

if TYPE_CHECKING:
    from carma_lab.simulator.simulation import Simulation

T = TypeVar("T")


class Heap(Generic[T]):
    __slots__ = ("_entries", "_pushed")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, T]] = []
        self._pushed = 0

    def push(self, at: float, what: T) -> None:
        heappush(self._entries, (at, self._pushed, what))
        self._pushed += 1

    def pop(self) -> tuple[float, T]:
        at, _, what = heappop(self._entries)
        return at, what

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> float | None:
        return self._entries[0][0] if self._entries else None


class Arrival(Record, frozen=True):
    place: int  # in the trace


class Started(Record, frozen=True):
    key: AttemptKey


class FirstUse(Record, frozen=True):
    """The first use of the GPU by an attempt."""

    key: AttemptKey


class Saved(Record, frozen=True):
    """A preempted attempt has saved, and leaves."""

    key: AttemptKey


class EstimateReady(Record, frozen=True):
    """An estimate that took some time is ready."""

    task: TaskId


class SampleDue(Record, frozen=True):
    pass


class Wake(Record, frozen=True):
    pass


class Ending(Record, frozen=True):
    """The outcome of an attempt. It is passed to the core after the samples taken so far."""

    key: AttemptKey
    outcome: Outcome


Occurrence = Arrival | Started | FirstUse | Saved | EstimateReady | SampleDue | Wake | tuple[RunningTask, int]


SIGNAL = 10
GRACE_S = 120.0  # or twice what a save takes: none is too late here


def signal_of(row: TraceTask) -> SaveSignal | None:
    """What its submission declares."""
    return SaveSignal(SIGNAL, max(GRACE_S, 2.0 * (row.save_s or 0.0))) if row.can_leave else None


def saved_work_s(row: TraceTask, runner: RunningTask) -> float:
    """How much of its work an attempt that ended leaves behind: all of it if it saved on a signal, else what its last
    checkpoint has. An attempt that is told to stop, or that ran out of memory, saves nothing more."""
    done_s = runner.done_s + runner.progress_s
    if runner.saving and row.save_s is not None:
        return done_s
    if row.checkpoint_s <= 0.0:
        return runner.done_s
    return max(runner.done_s, done_s // row.checkpoint_s * row.checkpoint_s)


def spec_of(row: TraceTask, asked: Asked) -> TaskSpec:
    return TaskSpec(
        command=(row.name,),
        directory="/",
        name=row.name,
        gpus=row.gpus,
        priority=asked.priority,
        exclusive=asked.exclusive,
        time_limit_s=asked.time_limit_s,
        checkpoint=signal_of(row),
    )


def owner_of(user: str) -> Owner:
    """The same number for the same name, in every run."""
    uid = 1000 if not user else 1001 + sum(ord(letter) * 31**place for place, letter in enumerate(user)) % 60_000
    return Owner(uid, uid, user or "user")


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
