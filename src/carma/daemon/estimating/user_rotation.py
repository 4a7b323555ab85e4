"""A limited number of places in which users take turns: the next place goes to the user whose last turn was longest
ago. The requests of one user are served in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class UserRotation:
    def __init__(self, places: int) -> None:
        self.places = places
        self._free = places
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by uid
        self._turn = count(1)
        self._last_turn: dict[int, int] = {}  # by uid

    @asynccontextmanager
    async def place(self, uid: int) -> AsyncIterator[None]:
        """One of the places, held as long as the block runs."""
        await self._acquire(uid)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, uid: int) -> None:
        if self._free:
            self._free -= 1
            self._last_turn[uid] = next(self._turn)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._release()  # the place was given at the moment of the cancellation
            else:
                self._waiting[uid].remove(mine)
                self._drop_empty(uid)
            raise

    def _release(self) -> None:
        if not self._waiting:
            self._free += 1
            if self._free == self.places:
                self._last_turn.clear()  # no request is open: earlier turns no longer count
            return
        uid = min(self._waiting, key=lambda uid: self._last_turn.get(uid, 0))
        self._last_turn[uid] = next(self._turn)
        self._waiting[uid].popleft().set_result(None)
        self._drop_empty(uid)

    def _drop_empty(self, uid: int) -> None:
        if not self._waiting[uid]:
            del self._waiting[uid]
