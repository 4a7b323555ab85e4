"""Asks the estimators, and lets nobody wait for another's: quick sources answer at once, the others (a trial run) get
one of a few places, in which users take turns.

A place is given back when its estimate is called off, or takes too long. What a command would run is looked at in a
thread for each user (looking.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

from msgspec.structs import replace

from carma.core.model.settings import Memory
from carma.core.model.units import show_s
from carma.core.model.values import Estimate, Gpu, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.daemon.background_thread import Worker
from carma.daemon.estimating.fingerprints import Fingerprint, Looks
from carma.daemon.estimating.user_rotation import Turns
from carma.estimate.combination import Answer, first_answer, split

log = logging.getLogger("carma.daemon")

QUICK_LIMIT_S = 60.0  # for the quick sources; only a plugin among them can hang
SPARE_S = 30.0  # beyond a trial run's own limit: it ends by itself, with a better reason than ours
LET_GO_S, AT_END_S = 5.0, 1.0  # for one that was called off to end, before its place is given away; as the daemon ends
_STUCK = 32  # so many threads may be left behind; from there on a place is kept until its thread has ended

CallOff = Callable[[TaskId], None]


class Estimates:
    """`call_off` ends the trial run of a task; `fingerprint` names what a command would run (None: nobody looks)."""

    def __init__(
        self,
        estimators: Sequence[Estimator],
        memory: Memory,
        gpus: Callable[[], tuple[Gpu, ...]],
        *,
        call_off: CallOff = lambda _task: None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self._quick, self._slow = split(estimators)
        self._limit_s = memory.trial_limit_s + SPARE_S
        self._gpus = gpus
        self._call_off = call_off
        self._looks = None if fingerprint is None else Looks(fingerprint)
        self._at_once = Worker("quick estimators")
        self._turns = Turns(memory.estimators_at_once)
        self._begun: dict[TaskId, float] = {}  # monotonic; of those that have a place
        self._waiting: set[TaskId] = set()  # for a place
        self._stuck = 0
        self._let_go_s = LET_GO_S
        self._foreseen = count(-1, -1)  # ids of tasks that there are not, each of its own so that it can be called off

    async def foresee(self, owner: Owner, spec: TaskSpec) -> Estimate | None:
        """Of a task that is not submitted (yet)."""
        (estimate, _), _ = await self.ask(TaskId(next(self._foreseen)), owner, spec)
        return estimate

    async def ask(self, task: TaskId, owner: Owner, spec: TaskSpec) -> tuple[Answer, str]:
        """The answer, and the fingerprint of what was asked about. Cancelled, it calls the trial run off. An error (for
        example, no thread can be started) becomes a refusal: without an answer the task would wait for ever."""
        request = EstimateRequest(task=task, owner=owner, spec=spec, gpus=self._gpus())
        try:
            return await self._ask(request)
        except Exception as error:
            log.error("the estimators could not be asked about task %d: %s: %s", task, type(error).__name__, error)
            return (None, (NoEstimate(source="all", reason=f"the estimators could not be asked: {error}"),)), ""

    async def _ask(self, request: EstimateRequest) -> tuple[Answer, str]:
        if self._looks is not None:
            request = replace(request, fingerprint=await self._looks.at(request))
        answer = await self._quickly(request)
        if answer[0] is None and self._slow:
            answer = await self._in_turn(request, answer[1])
        return answer, request.fingerprint

    def close(self) -> None:
        """As the daemon ends; those who still ask are cancelled by whoever started them."""
        self._let_go_s = AT_END_S
        self._at_once.close(wait_s=0.0)

    def stage(self, task: TaskId) -> str:
        """How far it is, as a phrase; "" for one that is not (or no longer) asked about."""
        begun_s = self._begun.get(task)
        if begun_s is not None:
            return f"a trial run since {show_s(time.monotonic() - begun_s)}"
        if task in self._waiting:
            places = "the one place" if self._turns.places == 1 else f"one of {self._turns.places} places"
            return f"it waits for {places} for trial runs"
        return ""

    async def _quickly(self, request: EstimateRequest) -> Answer:
        if not self._quick:
            return None, ()
        worker = self._at_once
        try:
            async with asyncio.timeout(QUICK_LIMIT_S):
                return await worker.call(lambda: first_answer(self._quick, request))
        except TimeoutError:
            log.error("the quick sources took more than %g s for task %d", QUICK_LIMIT_S, request.task)
            if self._at_once is worker:
                self._at_once = Worker("quick estimators")  # the old one is stuck
            return None, (NoEstimate(source="all", reason=f"no answer within {QUICK_LIMIT_S:g} s"),)

    async def _in_turn(self, request: EstimateRequest, refused: Sequence[NoEstimate]) -> Answer:
        task = request.task
        self._waiting.add(task)
        try:
            async with self._turns.place(request.owner.uid):
                self._waiting.discard(task)
                self._begun[task] = begun_s = time.monotonic()
                try:
                    return await self._slowly(request, refused)
                finally:
                    if self._begun.get(task) == begun_s:  # else it is asked about again already
                        del self._begun[task]
        finally:
            self._waiting.discard(task)

    async def _slowly(self, request: EstimateRequest, refused: Sequence[NoEstimate]) -> Answer:
        worker = Worker("estimator")
        asked = worker.call(lambda: first_answer(self._slow, request, refused))
        worker.close(wait_s=0.0)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            log.error("the estimators took more than %g s for task %d", self._limit_s, request.task)
            late = NoEstimate(source="all", reason=f"no answer within {self._limit_s:g} s")
            return None, (*refused, late)
        finally:
            if not asked.done():
                await self._let_go(request.task, asked)

    async def _let_go(self, task: TaskId, asked: asyncio.Future[Answer]) -> None:
        """Call it off, and keep its place until it has ended; one that does not end is left behind."""
        self._call_off(task)
        self._stuck += 1
        asked.add_done_callback(self._came_back)
        await asyncio.wait({asked}, timeout=self._let_go_s if self._stuck <= _STUCK else None)

    def _came_back(self, asked: asyncio.Future[Answer]) -> None:
        self._stuck -= 1
        if not asked.cancelled():
            asked.exception()  # nobody waits for it any more
