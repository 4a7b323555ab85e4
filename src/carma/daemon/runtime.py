"""The daemon's clock, and its threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


CATCH_UP_SPEED = 0.5  # relative, of a clock that is ahead of the wall clock


class SteadyClock:
    """Epoch seconds that never go back, whatever happens to the machine's clock.

    The wall clock is read once, at the start; from then on the monotonic clock counts. On virtual GPUs, `speed` makes
    time pass faster. A clock that is ahead of the wall clock, because that was set back or because time passed faster
    on virtual GPUs before, runs at half speed until the wall clock has caught up (not on virtual GPUs).
    """

    def __init__(
        self,
        speed: float = 1.0,
        *,
        not_before: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`not_before`: the time of the last stored event. After a restart with an older wall clock, time continues
        from there."""
        self.speed = speed
        self._monotonic = monotonic
        self._origin_s = monotonic()
        self._wall_at = wall()
        self._not_before = not_before

    @property
    def ahead_s(self) -> float:
        """Seconds by which this clock was ahead of the wall clock at the start."""
        return max(0.0, self._not_before - self._wall_at)

    def now(self) -> float:
        passed_s = (self._monotonic() - self._origin_s) * self.speed
        catching_up = CATCH_UP_SPEED if self.speed == 1.0 else 1.0
        return max(self._wall_at + passed_s, self._not_before + catching_up * passed_s)


class BackgroundThread:
    """Runs calls one after the other, in the order in which they were given; the results arrive in the event loop.

    Unlike the threads of an executor, it never keeps the process from ending: a driver call or a plugin that hangs must
    not make `carma down` hang.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call. The future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            settle: Callable[[], None]
            try:
                settle = partial(future.set_result, function())
            except BaseException as error:
                settle = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed: no caller waits any more
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self._calls.put(work)
        return future

    def close(self, wait_s: float = 5.0) -> None:
        """Finish the queued calls. A call that hangs is left behind after `wait_s`."""
        self._calls.put(None)
        self._thread.join(wait_s)
