"""Slots that users share: users take turns, and a request that was abandoned does not keep its slot."""

from __future__ import annotations

import asyncio

from carma.daemon.estimating import UserRotation

ALICE, BOB, CAROL = 1, 2, 3


class Crowd:
    """Each request records its name when it gets a slot, and releases the slot when the test says so."""

    def __init__(self, places: int) -> None:
        self.turns = UserRotation(places)
        self.order: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, uid: int, name: str) -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stay(uid, name))
        await rest()

    async def _stay(self, uid: int, name: str) -> None:
        async with self.turns.place(uid):
            self.order.append(name)
            await self._leave[name].wait()

    async def leaves(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await rest()

    async def goes_away(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await rest()

    async def all_leave(self) -> None:
        while any(not task.done() for task in self._tasks.values()):
            for name in list(self.order):
                self._leave[name].set()
            await rest()


async def rest() -> None:
    """Waits until all requests that can get a slot have one."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_no_more_requests_than_places_run_at_once() -> None:
    async def work() -> None:
        crowd = Crowd(2)
        for name in ("a1", "a2", "a3"):
            await crowd.comes(ALICE, name)
        assert crowd.order == ["a1", "a2"]
        await crowd.leaves("a2")
        assert crowd.order == ["a1", "a2", "a3"]
        await crowd.all_leave()

    asyncio.run(work())


def test_users_take_turns_however_many_requests_each_has() -> None:
    async def work() -> None:
        crowd = Crowd(1)
        for name in ("a1", "a2", "a3", "a4"):
            await crowd.comes(ALICE, name)
        await crowd.comes(BOB, "b1")
        await crowd.comes(BOB, "b2")
        await crowd.comes(CAROL, "c1")
        await crowd.all_leave()
        assert crowd.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    asyncio.run(work())


def test_a_cancelled_request_keeps_no_place() -> None:
    async def work() -> None:
        crowd = Crowd(1)
        for name in ("a1", "a2", "a3"):
            await crowd.comes(ALICE, name)
        await crowd.goes_away("a2")  # while it waits
        await crowd.goes_away("a1")  # while it has the place
        assert crowd.order == ["a1", "a3"]
        await crowd.leaves("a3")
        await crowd.comes(BOB, "b1")
        assert crowd.order[-1] == "b1"
        await crowd.all_leave()

    asyncio.run(work())


def test_a_place_given_at_the_moment_of_cancellation_goes_to_the_next() -> None:
    async def work() -> None:
        turns = UserRotation(1)
        async with turns.place(ALICE):
            waits = asyncio.create_task(_hold(turns, BOB))
            behind = asyncio.create_task(_hold(turns, CAROL))
            await rest()
        waits.cancel()  # it was given the place just now, and has not run since
        await asyncio.gather(waits, return_exceptions=True)
        async with asyncio.timeout(60):
            await behind

    asyncio.run(work())


async def _hold(turns: UserRotation, uid: int) -> None:
    async with turns.place(uid):
        pass
