"""What happens in a simulation.

1. The heap: everything that happens at a known time, in the order of time.
2. Rows of a trace as submitted tasks, and the work that an ended attempt leaves behind.
3. Progress of a run, and the error for a run that cannot continue.
"""

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
GRACE_S = 120.0  # or twice the duration of a save: no simulated save takes longer


def signal_of(row: TraceTask) -> SaveSignal | None:
    """The checkpoint signal that its submission declares."""
    return SaveSignal(SIGNAL, max(GRACE_S, 2.0 * (row.save_s or 0.0))) if row.can_leave else None


def saved_work_s(row: TraceTask, runner: RunningTask) -> float:
    """Work that an ended attempt leaves behind: all of it if it saved on a signal, otherwise that of its last
    checkpoint. An attempt that is stopped or runs out of memory saves nothing more."""
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
    """The same UID for the same name in every run."""
    uid = 1000 if not user else 1001 + sum(ord(letter) * 31**place for place, letter in enumerate(user)) % 60_000
    return Owner(uid, uid, user or "user")


EVERY = 256  # events, some hundredths of a second
OnProgress = Callable[[int, int, float], None]  # ended tasks, all tasks, simulated seconds


def followed(made: Simulation, on_progress: OnProgress) -> Iterator[AnyEvent]:
    """The events of the run; `on_progress` is called every 256 events and at the end."""
    total = len(made.trace.tasks)
    for number, event in enumerate(made.events(), 1):
        yield event
        if number % EVERY == 0:
            on_progress(len(made.runs), total, made.now)
    on_progress(len(made.runs), total, made.now)


NAMED = 5  # tasks


def stalled(state: State, now: float) -> Refused:
    """No task runs, all have arrived, and the queue is not empty. The error states the reason of its first task."""
    queue = list(queued_ids(state, now))
    named = ", ".join(map(str, queue[:NAMED])) + (", …" if len(queue) > NAMED else "")
    count = f"{show_count(len(queue), 'task')} {'waits' if len(queue) == 1 else 'wait'} ({named})"
    reason = waiting(state, now, queue[:1])[queue[0]]
    return Refused(
        f"no task runs or will arrive, and {count}. Task {queue[0]}: {reason.sentence} ({reason.code})",
        "The policy or the settings place it on no GPU, not even on an idle one.",
    )
