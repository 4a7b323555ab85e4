"""One background thread that answers into the event loop.

Unlike an executor's, its thread never keeps the process from ending: a driver call or a plugin that hangs must not
turn `carma down` into a hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Runs calls one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Give it a call; the future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value = function()
            except BaseException as error:
                _post(loop, future, None, error)
            else:
                _post(loop, future, value, None)

        self._calls.put(work)
        return future

    def close(self, wait_s: float = 5.0) -> None:
        """Let it finish what it was given; a call that hangs is left behind after `wait_s`."""
        self._calls.put(None)
        self._thread.join(wait_s)


def _post(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T | None, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():  # the caller was cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
