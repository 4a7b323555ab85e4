"""The shell around the core: the state, and every access to it by other parts of the daemon.

1. `change` hands events to the writer (writer.py), which commits and steps them. No other function changes the state.
2. `observe` hands over events that are not stored: samples, and the passing of time.
3. `read` reads the archive in a thread; `find` and `look_up` read one task.
4. `subscribe` and `wait_for` report what happened: to streams of events, and to requests that wait for something.
5. `request_stop` and `fail` end the daemon.

The shell decides nothing, starts nothing and knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from carma.config import LoadedSettings
from carma.core.model.events import Durable, StopRequested, Transient
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, TaskId
from carma.core.ports import Archive, Store
from carma.core.state import State
from carma.daemon.runtime import BackgroundThread, SteadyClock
from carma.errors import CarmaError, NotFound
from carma.paths import Paths

log = logging.getLogger("carma.daemon")

BUFFER = 1_000  # events that a subscriber may lag behind before its subscription ends

T = TypeVar("T")
Make = Callable[[State], Sequence[Durable]]
Predicate = Callable[[State], bool]


class Change(NamedTuple):
    """A request to the writer: `make` returns the events; `done` is set once they are durable and stepped."""

    make: Make
    done: asyncio.Future[None]

    def end(self, error: Exception | None = None) -> None:
        if self.done.done():  # its client has left
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Subscription:
    """An async iterator over (sequence, event). It ends when the subscriber lags too far behind, or at shutdown."""

    def __init__(self, leave: Callable[[Subscription], None], buffer: int = BUFFER) -> None:
        self._events: asyncio.Queue[tuple[int, Durable] | None] = asyncio.Queue()  # None: the end
        self._buffer = buffer
        self._leave = leave

    def put(self, sequence: int, event: Durable) -> None:
        if self._events.qsize() >= self._buffer:
            self.close()
        else:
            self._events.put_nowait((sequence, event))

    def close(self) -> None:
        self._events.put_nowait(None)
        self._leave(self)

    def __aiter__(self) -> AsyncIterator[tuple[int, Durable]]:
        return self

    async def __anext__(self) -> tuple[int, Durable]:
        found = await self._events.get()
        if found is None:
            raise StopAsyncIteration
        return found


class Recorder(Protocol):
    """Counts what happens, for the metrics. Called on the event loop; must be quick."""

    def stepped(self, event: Durable, state: State) -> None: ...

    def decided(self, seconds: float) -> None: ...


class StoreAndArchive(Store, Archive, Protocol):
    """The log of events and the archive, in one file."""


class Shell:
    def __init__(
        self,
        *,
        state: State,
        sequence: int,
        store: StoreAndArchive,
        clock: SteadyClock,
        loaded: LoadedSettings,
        paths: Paths,
    ) -> None:
        self.state = state
        self.sequence = sequence  # of the last event that was stepped
        self.store: Store = store
        self.archive: Archive = store
        self.clock = clock
        self.settings, self.origins = loaded
        self.paths = paths
        self.started_at = clock.now()
        self.reconciled = asyncio.Event()  # the state agrees with the living processes
        self.stopping = asyncio.Event()
        self.released = asyncio.Event()  # streams end
        self.cancel_at_stop = False
        self.failure: CarmaError | None = None  # the error that ends the daemon; the state must not be saved then
        self.changes: deque[Change] = deque()
        self.transient: deque[Transient] = deque()
        # Stops of running attempts that the store refused. The loop carries them out, and stores them when it can.
        self.unstored_stops: deque[tuple[AttemptKey, StopRequested]] = deque()
        self.wake = asyncio.Event()  # the writer has something to do
        self.recorder: Recorder | None = None
        self._subscriptions: set[Subscription] = set()
        self._waiting: dict[asyncio.Future[bool], Predicate] = {}
        self._store_thread = BackgroundThread("store")
        self._read_threads = (BackgroundThread("archive"), BackgroundThread("report"))

    # Changes.

    async def commit(self, events: Sequence[Durable]) -> None:
        """Waits until these events are durable and stepped."""
        await self.change(lambda _state: events)

    async def change(self, make: Make) -> None:
        """Commit the events that `make` returns for the state at that moment. Raises what `make` raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changes.append(Change(make, done))
        self.wake.set()
        await done

    def observe(self, event: Transient) -> None:
        """Step an event that is not stored: a sample, or the passing of time."""
        self.transient.append(event)
        self.wake.set()

    async def in_store(self, function: Callable[[], T]) -> T:
        """Call the store or the archive in the thread that commits, after earlier commits."""
        return await self._store_thread.call(function)

    # Reads.

    async def read(self, function: Callable[[], T], *, slow: bool = False) -> T:
        """Read the archive in a thread. Slow reads have a thread of their own and do not delay the others."""
        return await self._read_threads[slow].call(function)

    def find(self, task: TaskId) -> Task | None:
        """A task from memory or the archive. Reads the archive on the event loop: only for single tasks."""
        return self.state.tasks.get(task) or self.archive.task(task)

    async def look_up(self, task: TaskId) -> Task:
        """A task from memory or the archive. Raises NotFound."""
        found = self.state.tasks.get(task) or await self.read(lambda: self.archive.task(task))
        if found is None:
            raise no_such_task(task)
        return found

    # What happened.

    def subscribe(self) -> Subscription:
        """Every event from now on. The caller closes it."""
        subscription = Subscription(self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def publish(self, sequence: int, event: Durable) -> None:
        for subscription in list(self._subscriptions):
            subscription.put(sequence, event)

    async def wait_for(self, predicate: Predicate, timeout_s: float) -> bool:
        """True once the predicate holds; False after `timeout_s` real seconds, or when the daemon stops."""
        if predicate(self.state):
            return True
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[done] = predicate
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            return False
        finally:
            del self._waiting[done]

    def answer_waiting(self) -> None:
        """Answer the calls of `wait_for` whose predicate holds. A predicate that raises fails only its own call."""
        for done, predicate in self._waiting.items():
            try:
                if not done.done() and predicate(self.state):
                    done.set_result(True)
            except Exception as error:
                done.set_exception(error)

    # The end.

    def request_stop(self, cancel_running: bool = False) -> None:
        self.cancel_at_stop = self.cancel_at_stop or cancel_running
        self.stopping.set()

    def fail(self, error: CarmaError) -> None:
        """End the daemon with this error. Running tasks continue; nothing more is stored."""
        log.error("%s. %s", error, error.hint)
        self.failure = error
        self.request_stop()

    def release(self) -> None:
        """End every stream, subscription, wait and open change, so that the HTTP server can close."""
        self.stopping.set()
        self.released.set()
        for subscription in list(self._subscriptions):
            subscription.close()
        for done in self._waiting:
            if not done.done():
                done.set_result(False)
        self.fail_changes(CarmaError("the daemon is stopping", "start it again with: carma up"))

    def fail_changes(self, error: CarmaError) -> None:
        while self.changes:
            self.changes.popleft().end(error)

    def close(self) -> None:
        """Must be called after the writer has ended."""
        self.release()
        for thread in self._read_threads:
            thread.close(wait_s=1.0)
        self._store_thread.close()
        self.store.close()


def no_such_task(task: TaskId) -> NotFound:
    return NotFound(f"there is no task {task}", "`carma queue` and `carma history` list tasks")
