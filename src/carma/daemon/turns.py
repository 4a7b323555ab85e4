"""Who goes next where only so many can: users take turns, and each user's own come in the order in which they asked."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    def __init__(self, places: int) -> None:
        self.places = places
        self._free = places
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()  # by uid, the next one first

    @asynccontextmanager
    async def place(self, uid: int) -> AsyncIterator[None]:
        """One of the places, held as long as the block runs."""
        await self._come(uid)
        try:
            yield
        finally:
            self._leave()

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    async def _come(self, uid: int) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._leave()  # the place came in the moment in which nobody wanted it any more
            else:
                self._forget(uid, mine)
            raise

    def _forget(self, uid: int, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(uid)
        if line is not None and mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[uid]

    def _leave(self) -> None:
        """The place goes to the user whose turn is longest ago."""
        while self._waiting:
            uid, line = next(iter(self._waiting.items()))
            first = line.popleft()
            if line:
                self._waiting.move_to_end(uid)
            else:
                del self._waiting[uid]
            if not first.done():
                first.set_result(None)
                return
        self._free += 1
