"""Who waits for something to happen: streams of events, and requests that wait for a task to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from carma.core.model.events import Durable
from carma.core.state import State

BUFFER = 1_000  # events that a subscriber may lag behind before its subscription ends


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


class Subscribers:
    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []
        self._waiting: dict[asyncio.Future[bool], Callable[[State], bool]] = {}  # with the predicate of each

    def subscribe(self) -> Subscription:
        subscription = Subscription(self._leave)
        self._subscriptions.append(subscription)
        return subscription

    def _leave(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool:
        """True once `check` finds that the predicate holds; False after `timeout_s` or `release`."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[done] = predicate
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            return False
        finally:
            del self._waiting[done]

    def publish(self, sequence: int, event: Durable) -> None:
        for subscription in list(self._subscriptions):
            subscription.put(sequence, event)

    def check(self, state: State) -> None:
        """Answer the waiters whose predicate holds. A predicate that raises fails only its own waiter."""
        for done, predicate in self._waiting.items():
            try:
                if not done.done() and predicate(state):
                    done.set_result(True)
            except Exception as error:
                done.set_exception(error)

    def release(self) -> None:
        """End all subscriptions and waits, because the daemon stops."""
        for subscription in list(self._subscriptions):
            subscription.close()
        for done in self._waiting:
            if not done.done():
                done.set_result(False)
