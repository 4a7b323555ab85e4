"""Asks the estimators. No user waits for the estimate of another user's task.

1. Sources that declare `quick` answer at once, in one thread.
2. The others (a trial run) get one of a few places, in which users take turns. A place is free again when its estimate
   ends, is cancelled, or takes too long.
3. The fingerprint of what a command would run is computed beforehand, in a thread for each user (fingerprints.py).
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
from carma.daemon.estimating.fingerprints import Fingerprint, Fingerprints
from carma.daemon.estimating.user_rotation import UserRotation
from carma.daemon.runtime import BackgroundThread
from carma.estimate.combination import Answer, first_answer, split

log = logging.getLogger("carma.daemon")

QUICK_LIMIT_S = 60.0  # for the quick sources; only a plugin among them can hang
SPARE_S = 30.0  # beyond a trial run's own limit: it ends by itself, with a better reason than ours
UNSUBMITTED_LIMIT_S = 20.0  # for an estimate that an API request waits for
CANCEL_S, CANCEL_AT_CLOSE_S = 5.0, 1.0  # for a cancelled estimate to end before its place is given away
MOST_STUCK = 32  # threads that may be left behind; beyond that, a place stays taken until its thread has ended

CancelTrial = Callable[[TaskId], None]


class Estimates:
    def __init__(
        self,
        estimators: Sequence[Estimator],
        memory: Memory,
        gpus: Callable[[], tuple[Gpu, ...]],
        *,
        cancel_trial: CancelTrial = lambda _task: None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """`cancel_trial` ends the trial run of a task; `fingerprint` identifies what a command would run."""
        self._quick, self._slow = split(estimators)
        self._limit_s = memory.trial_limit_s + SPARE_S
        self._gpus = gpus
        self._cancel_trial = cancel_trial
        self._fingerprints = None if fingerprint is None else Fingerprints(fingerprint)
        self._quick_thread = BackgroundThread("quick estimators")
        self._rotation = UserRotation(memory.estimators_at_once)
        self._begun_s: dict[TaskId, float] = {}  # monotonic; estimates that have a place
        self._waiting: set[TaskId] = set()  # for a place
        self._stuck = 0
        self._cancel_s = CANCEL_S
        self._unsubmitted_ids = count(-1, -1)  # different ones, so that each estimate can be cancelled

    async def of_unsubmitted(self, owner: Owner, spec: TaskSpec) -> Estimate | None:
        """The estimate for a task that is not (yet) submitted; None: unknown, or not within UNSUBMITTED_LIMIT_S."""
        try:
            async with asyncio.timeout(UNSUBMITTED_LIMIT_S):
                (estimate, _), _ = await self.ask(TaskId(next(self._unsubmitted_ids)), owner, spec)
                return estimate
        except TimeoutError:
            return None

    async def ask(self, task: TaskId, owner: Owner, spec: TaskSpec) -> tuple[Answer, str]:
        """The answer, and the fingerprint of the command. Cancelling this call cancels the trial run. An error (for
        example, no thread can be started) becomes a refusal: without an answer the task would wait forever."""
        request = EstimateRequest(task=task, owner=owner, spec=spec, gpus=self._gpus())
        try:
            return await self._ask(request)
        except Exception as error:
            log.error("the estimators could not be asked about task %d: %s: %s", task, type(error).__name__, error)
            return (None, (_refusal(f"the estimators could not be asked: {error}"),)), ""

    async def _ask(self, request: EstimateRequest) -> tuple[Answer, str]:
        if self._fingerprints is not None:
            request = replace(request, fingerprint=await self._fingerprints.of(request))
        answer = await self._ask_quick(request)
        if answer[0] is None and self._slow:
            answer = await self._ask_slow_in_turn(request, answer[1])
        return answer, request.fingerprint

    def close(self) -> None:
        """At the end of the daemon. The callers of `ask` cancel their own calls."""
        self._cancel_s = CANCEL_AT_CLOSE_S
        self._quick_thread.close(wait_s=0.0)

    def stage(self, task: TaskId) -> str:
        """The progress of an estimate, as a phrase; "" for a task that no estimator is asked about."""
        begun_s = self._begun_s.get(task)
        if begun_s is not None:
            return f"a trial run since {show_s(time.monotonic() - begun_s)}"
        if task in self._waiting:
            places = "the one place" if self._rotation.places == 1 else f"one of {self._rotation.places} places"
            return f"it waits for {places} for trial runs"
        return ""

    async def _ask_quick(self, request: EstimateRequest) -> Answer:
        if not self._quick:
            return None, ()
        thread = self._quick_thread
        try:
            async with asyncio.timeout(QUICK_LIMIT_S):
                return await thread.call(lambda: first_answer(self._quick, request))
        except TimeoutError:
            log.error("the quick sources took more than %g s for task %d", QUICK_LIMIT_S, request.task)
            if self._quick_thread is thread:
                self._quick_thread = BackgroundThread("quick estimators")  # the old thread hangs
            return None, (_refusal(f"no answer within {QUICK_LIMIT_S:g} s"),)

    async def _ask_slow_in_turn(self, request: EstimateRequest, refused: Sequence[NoEstimate]) -> Answer:
        task = request.task
        self._waiting.add(task)
        try:
            async with self._rotation.place(request.owner.uid):
                self._waiting.discard(task)
                self._begun_s[task] = begun_s = time.monotonic()
                try:
                    return await self._ask_slow(request, refused)
                finally:
                    if self._begun_s.get(task) == begun_s:  # otherwise a new estimate of the task has begun
                        del self._begun_s[task]
        finally:
            self._waiting.discard(task)

    async def _ask_slow(self, request: EstimateRequest, refused: Sequence[NoEstimate]) -> Answer:
        thread = BackgroundThread("estimator")
        asked = thread.call(lambda: first_answer(self._slow, request, refused))
        thread.close(wait_s=0.0)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            log.error("the estimators took more than %g s for task %d", self._limit_s, request.task)
            return None, (*refused, _refusal(f"no answer within {self._limit_s:g} s"))
        finally:
            if not asked.done():
                await self._cancel(request.task, asked)

    async def _cancel(self, task: TaskId, asked: asyncio.Future[Answer]) -> None:
        """Keep the place until the estimate has ended; an estimate that does not end is left behind."""
        self._cancel_trial(task)
        self._stuck += 1
        asked.add_done_callback(self._ended_late)
        await asyncio.wait({asked}, timeout=self._cancel_s if self._stuck <= MOST_STUCK else None)

    def _ended_late(self, asked: asyncio.Future[Answer]) -> None:
        self._stuck -= 1
        if not asked.cancelled():
            asked.exception()  # marks it as retrieved: no caller waits for it any more


def _refusal(reason: str) -> NoEstimate:
    return NoEstimate(source="all", reason=reason)
