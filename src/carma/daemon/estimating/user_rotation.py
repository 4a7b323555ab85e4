"""Who goes next where only so many can: the user whose last turn is longest ago; each user's own come in the order in
which they asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class Turns:
    def __init__(self, places: int) -> None:
        self.places = places
        self._free = places
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by uid
        self._turn = count(1)
        self._last: dict[int, int] = {}  # the number of each user's last turn

    @asynccontextmanager
    async def place(self, uid: int) -> AsyncIterator[None]:
        """One of the places, held as long as the block runs."""
        await self._come(uid)
        try:
            yield
        finally:
            self._leave()

    async def _come(self, uid: int) -> None:
        if self._free:
            self._free -= 1
            self._last[uid] = next(self._turn)
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
        line = self._waiting[uid]
        line.remove(mine)
        if not line:
            del self._waiting[uid]

    def _leave(self) -> None:
        if not self._waiting:
            self._free += 1
            if self._free == self.places:
                self._last.clear()  # all quiet: nobody has anything ahead of anybody
            return
        uid = min(self._waiting, key=lambda uid: self._last.get(uid, 0))
        self._last[uid] = next(self._turn)
        line = self._waiting[uid]
        line.popleft().set_result(None)
        if not line:
            del self._waiting[uid]
