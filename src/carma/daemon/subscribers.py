"""Who waits for something to happen: streams of events, and requests that wait for a task to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

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


class _Waiter(NamedTuple):
    predicate: Callable[[State], bool]
    done: asyncio.Future[bool]


class Subscribers:
    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []
        self._waiters: list[_Waiter] = []

    def subscribe(self) -> Subscription:
        subscription = Subscription(self._leave)
        self._subscriptions.append(subscription)
        return subscription

    def _leave(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool:
        """True once `check` finds that the predicate holds; False after `timeout_s` or `release`."""
        waiter = _Waiter(predicate, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.done
        except TimeoutError:
            return False
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def publish(self, sequence: int, event: Durable) -> None:
        for subscription in list(self._subscriptions):
            subscription.put(sequence, event)

    def check(self, state: State) -> None:
        """Answer the waiters whose predicate holds. A predicate that raises fails only its own waiter."""
        for waiter in self._waiters:
            if waiter.done.done():
                continue
            try:
                if waiter.predicate(state):
                    waiter.done.set_result(True)
            except Exception as error:
                waiter.done.set_exception(error)
        self._waiters[:] = [waiter for waiter in self._waiters if not waiter.done.done()]

    def release(self) -> None:
        """End all subscriptions and waits, because the daemon stops."""
        for subscription in list(self._subscriptions):
            subscription.close()
        for waiter in self._waiters:
            if not waiter.done.done():
                waiter.done.set_result(False)
        self._waiters.clear()
