"""The shell around the core: the one writer of the log.

Everything that changes the state comes through `change`: a request, an outcome, an estimate, a proposal of the core.
One coroutine (`run`) takes what is waiting, commits it in one transaction, steps it, and hands out the commands that
follow. Nothing is acknowledged before it is durable, and nothing is stepped that is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from carma.core.machine import step
from carma.core.model.commands import Command
from carma.core.model.events import (
    AttemptEnded,
    Durable,
    MemoryObserved,
    PreemptionRequested,
    TaskPlaced,
    Transient,
    UseNoted,
)
from carma.core.model.values import Estimate, Owner, TaskId, TaskSpec
from carma.core.ports import Archive, Store
from carma.core.propose import propose
from carma.core.state import State, checkpoint, forget
from carma.core.telemetry import usage
from carma.daemon.background_thread import Worker
from carma.daemon.clock import SteadyClock
from carma.daemon.daemon_log import Seldom
from carma.daemon.subscribers import Listeners, Subscription
from carma.daemon.views.task_story import task_of
from carma.errors import CarmaError, StoreError

if TYPE_CHECKING:
    from carma.config import Origin, Settings
    from carma.paths import Paths

log = logging.getLogger("carma.daemon")

T = TypeVar("T")
Make = Callable[[State], Sequence[Durable]]
Execute = Callable[[Sequence[Command], Durable], None]
Stepped = Callable[[Durable], None]
Foresee = Callable[[Owner, TaskSpec], Awaitable[Estimate | None]]
Stage = Callable[[TaskId], str]

CHECKPOINT_EVERY = 2_000  # events
BATCH = 512  # requests in one transaction
STEPS = 100  # events that are stepped without a pause
STORE_RETRY_S = 1.0  # pause before proposals are tried again on a disk that refused
USAGE_S = 60.0  # between two notes of what tasks and GPUs did; a daemon that is killed loses so much of it
THINKING_SHARE = 3.0  # after proposals took t seconds, requests have the loop for this many times t


class Fatal(Exception):
    """A stored event that the core cannot take: going on would mean acting on a state that the log does not give."""


class _Change(NamedTuple):
    make: Make
    done: asyncio.Future[int]


class Shell:
    def __init__(
        self,
        *,
        state: State,
        sequence: int,
        store: Store,
        archive: Archive,
        clock: SteadyClock,
        settings: Settings,
        origins: dict[str, Origin],
        paths: Paths,
    ) -> None:
        self.state = state
        self.sequence = sequence
        self.archive = archive
        self.clock = clock
        self.settings = settings
        self.origins = origins
        self.paths = paths
        self.started_at = clock.now()
        self.proposing = False  # set once the state agrees with the living processes
        self.stopping = asyncio.Event()
        self.cancel_at_stop = False
        self._store = store
        self._writer = Worker("store")
        self._readers = (Worker("archive"), Worker("report"))
        self._execute: Execute = lambda _commands, _event: None
        self._stepped: list[Stepped] = []
        self._foresee: Foresee | None = None
        self._stage: Stage = lambda _task: ""
        self._passing: deque[Transient] = deque()
        self._changes: deque[_Change] = deque()
        self._listeners = Listeners()
        self._wake = asyncio.Event()
        self._think_again_at = 0.0  # monotonic
        self._checkpoint_at = sequence + CHECKPOINT_EVERY
        self._usage_at = time.monotonic() + USAGE_S
        self._refusals, self._no_checkpoint, self._no_usage = Seldom(), Seldom(), Seldom()
        self._broken = False  # the state is not what the log gives; it must not be saved
        self.failure: CarmaError | None = None  # the error that ends the daemon

    # What others call.

    async def commit(self, events: Sequence[Durable]) -> int:
        """The sequence number of the last of these events, once they are durable and stepped."""
        return await self.change(lambda _state: events)

    async def change(self, make: Make) -> int:
        """Commit what `make` returns for the state at that moment; an error that it raises is the caller's."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._changes.append(_Change(make, done))
        self._wake.set()
        return await done

    def observe(self, event: Transient) -> None:
        """Something seen that is not stored: a sample, or that time passed."""
        self._passing.append(event)
        self._wake.set()

    async def read(self, function: Callable[[], T], *, slow: bool = False) -> T:
        """Run a read of the archive in a thread. Slow ones have a thread of their own and do not delay the others."""
        return await self._readers[slow].call(function)

    def shared(self, spec: TaskSpec) -> TaskSpec:
        """The same spec; its environment and command are the objects of stored tasks, if they are equal."""
        return self._store.shared(spec)

    def new_task_ids(self, count: int) -> TaskId:
        return self._store.new_task_ids(count)

    def subscribe(self) -> Subscription:
        """Every event from now on. Close it when done."""
        return self._listeners.subscribe()

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool:
        """Until the predicate holds (True), or so many real seconds passed or the daemon stops (False)."""
        return predicate(self.state) or await self._listeners.wait_for(predicate, timeout_s)

    async def estimate(self, owner: Owner, spec: TaskSpec) -> Estimate | None:
        """How much memory such a task would take, by those who would be asked if it were submitted."""
        return None if self._foresee is None else await self._foresee(owner, spec)

    def stage(self, task: TaskId) -> str:
        """How far the estimate of a task is, as a phrase; "" where there is nothing to tell."""
        return self._stage(task)

    def request_stop(self, cancel_running: bool = False) -> None:
        self.cancel_at_stop = self.cancel_at_stop or cancel_running
        self.stopping.set()

    def give_up(self, error: CarmaError) -> None:
        """End the daemon with this error. Running tasks go on; nothing more is stored."""
        log.error("%s. %s", error, error.hint)
        self.failure = error
        self._broken = True
        self.request_stop()

    def in_place(self) -> bool:
        """Whether the database is still the one that was opened. If not, nothing may be started."""
        return self._store.in_place()

    # What the daemon's own parts call.

    def connect(
        self, execute: Execute, stepped: Stepped, foresee: Foresee | None = None, stage: Stage = lambda _task: ""
    ) -> None:
        """Who carries out commands, is told of each stepped event, asks the estimators, knows how far they are."""
        self._execute = execute
        self._stepped.append(stepped)
        self._foresee = foresee
        self._stage = stage

    async def in_store(self, function: Callable[[], T]) -> T:
        """Run a call of the store or the archive in the writer's thread, after what was committed before."""
        return await self._writer.call(function)

    async def run(self) -> None:
        """The writer. Ends only by cancellation or with Fatal."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._whole_turn()
                await asyncio.sleep(0)  # one turn, then whoever else is ready
        except Fatal as error:
            self._broken = True
            self._fail_all(CarmaError(str(error)))
            raise

    async def close(self) -> None:
        """After `run` was cancelled: save what is needed for a quick start and let go of everybody who waits."""
        try:
            if not self._broken:
                await self._keep_usage()
                await self._save()
        except (StoreError, Fatal) as error:
            log.warning("the last checkpoint was not saved (%s); the next start replays the log instead", error)
        self.release()
        for reader in self._readers:
            reader.close(wait_s=1.0)
        self._writer.close()
        self._store.close()

    def release(self) -> None:
        """End every subscription, wait and request that is still open, so that the server can close."""
        self._listeners.release()
        self._fail_all(CarmaError("the daemon is stopping", "start it again with: carma up"))

    # One turn.

    async def _whole_turn(self) -> None:
        """Cancelled meanwhile, it is finished first: what was stored but not stepped would not be in the state that
        `close` goes on from."""
        turn = asyncio.ensure_future(self._turn())
        try:
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            await asyncio.wait((turn,))
            turn.result()
            raise

    async def _turn(self) -> None:
        while self._passing:
            self._see(self._passing.popleft())
        await self._flush()
        await self._think()
        if self.sequence >= self._checkpoint_at:
            await self._save_if_possible()
        if time.monotonic() >= self._usage_at:
            await self._keep_usage()
        self._listeners.answer(self.state)
        if self._changes or self._passing:
            self._wake.set()

    def _see(self, event: Transient) -> None:
        try:
            step(self.state, event)
        except Exception:
            log.exception("a sample was not understood and is left out: %r", event)

    async def _flush(self) -> None:
        """One transaction with all that waits and does not touch the same tasks."""
        events: list[Durable] = []
        taken: list[tuple[_Change, int]] = []
        later: list[_Change] = []
        touched: set[TaskId | None] = set()
        while self._changes and len(taken) < BATCH:
            change = self._changes.popleft()
            made = self._make(change)
            if made is None:
                continue
            subjects = {task_of(event) for event in made}  # None stands for the GPUs
            if not touched.isdisjoint(subjects):  # judge it again, on the state after this transaction
                later.append(change)
                continue
            touched |= subjects
            events.extend(made)
            taken.append((change, len(events)))
        self._changes.extendleft(reversed(later))
        if not taken:
            return
        try:
            first = await self._commit(events) - len(events)
        except StoreError as error:
            for change, _ in taken:
                _settle(change.done, error)
            return
        except Fatal as error:
            for change, _ in taken:
                _settle(change.done, CarmaError(str(error)))
            raise
        for change, count in taken:
            if not change.done.done():
                change.done.set_result(first + count)

    def _make(self, change: _Change) -> Sequence[Durable] | None:
        """The events of a change; None when there is nothing to commit for it (any more)."""
        if change.done.done():  # its client went away before anything happened
            return None
        try:
            made = change.make(self.state)
        except Exception as error:
            _settle(change.done, error)
            return None
        if not made:
            change.done.set_result(self.sequence)
            return None
        return made

    async def _commit(self, events: Sequence[Durable]) -> int:
        """Durable, then stepped. Raises StoreError with nothing changed, or Fatal.

        Where they tell an attempt's energy, what was seen of all others and of the GPUs goes with them: whenever the
        daemon is killed, the energy of the tasks is that of the GPUs.
        """
        if any(isinstance(event, AttemptEnded | MemoryObserved) for event in events):
            note = usage.note(self.state)
            events = [note, *events] if note.gpus else events
        try:
            last = await self._writer.call(lambda: self._store.append(events))
        except StoreError as error:
            self._refusals.error(f"not stored, so not done: {error}")
            raise
        except Exception as error:
            log.exception("the store failed")
            raise StoreError(f"the database did not take the change: {type(error).__name__}: {error}") from error
        self._refusals.over("the database takes changes again")
        self.sequence = last
        for place, event in enumerate(events, start=last - len(events) + 1):
            self._step(place, event)
            if place % STEPS == 0:
                await asyncio.sleep(0)  # an array is ten thousand events: requests are answered in between
        return last

    def _step(self, sequence: int, event: Durable) -> None:
        try:
            commands = step(self.state, event)
        except Exception as error:
            log.exception("event %d cannot follow what happened before: %r", sequence, event)
            raise Fatal(
                f"event {sequence} ({type(event).__name__}) is stored but cannot follow what happened before: {error}"
            ) from error
        try:
            for told in self._stepped:
                told(event)
            self._execute(commands, event)
        except Exception:
            log.exception("what follows from event %d was not carried out: %r", sequence, event)
        if not isinstance(event, UseNoted):  # it is no news
            self._listeners.tell(sequence, event)

    async def _think(self) -> None:
        """One round of proposals; another turn follows as long as there are some."""
        if not self.proposing:
            return
        started_s = time.monotonic()
        if started_s < self._think_again_at:
            return
        events = self._proposals()
        took_s = time.monotonic() - started_s
        pause_s = took_s * THINKING_SHARE if took_s > 0.002 else 0.0
        if events:
            try:
                await self._commit(events)
            except StoreError:
                pause_s = STORE_RETRY_S
        if pause_s:
            self._think_again_at = time.monotonic() + pause_s
            asyncio.get_running_loop().call_later(pause_s, self._wake.set)
        elif events:
            self._wake.set()

    def _proposals(self) -> list[Durable]:
        try:
            events = propose(self.state, self.clock.now())
        except Exception:
            log.exception("no decision was possible; trying again with the next event")
            return []
        if self.stopping.is_set():  # nothing new starts; what ends is still recorded
            return [event for event in events if not isinstance(event, TaskPlaced | PreemptionRequested)]
        return events

    async def _save_if_possible(self) -> None:
        try:
            await self._save()
        except Exception as error:
            self._checkpoint_at = self.sequence + CHECKPOINT_EVERY // 10
            self._no_checkpoint.error(f"no checkpoint: {error}")

    async def _save(self) -> None:
        saved, finished = checkpoint(self.state, self.sequence)
        await self._writer.call(lambda: self._store.save(saved, finished))
        forget(self.state, finished)
        self._checkpoint_at = self.sequence + CHECKPOINT_EVERY

    async def _keep_usage(self) -> None:
        """Note what tasks and GPUs did since the last time; what the disk does not take is kept for the next."""
        self._usage_at = time.monotonic() + USAGE_S
        note = usage.note(self.state)
        if not note.gpus:
            return
        try:
            await self._commit([note])
        except StoreError as error:
            self._no_usage.error(f"what the GPUs did was not noted: {error}")
        else:
            self._no_usage.over("what the GPUs do is noted again")

    def _fail_all(self, error: CarmaError) -> None:
        while self._changes:
            _settle(self._changes.popleft().done, error)


def _settle(future: asyncio.Future[int], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
