"""Asks the estimators. No user waits for the estimate of another user's task.

1. Sources that declare `quick` answer at once, in one thread.
2. The others (a trial run) get one of a few places, in which users take turns. A place is free again when its estimate
   ends, is cancelled, or takes too long.
3. The fingerprint of what a command would run is computed beforehand, in a thread for each user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

from msgspec.structs import replace

from carma.command_pattern import pattern
from carma.core.model.settings import Memory
from carma.core.model.units import show_s
from carma.core.model.values import Estimate, Gpu, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.daemon.runtime import BackgroundThread
from carma.estimate.combination import Answer, first_answer, split

log = logging.getLogger("carma.daemon")

QUICK_LIMIT_S = 60.0  # for the quick sources; only a plugin among them can hang
SPARE_S = 30.0  # beyond a trial run's own limit: it ends by itself, with a better reason than ours
UNSUBMITTED_LIMIT_S = 20.0  # for an estimate that an API request waits for
CANCEL_S, CANCEL_AT_CLOSE_S = 5.0, 1.0  # for a cancelled estimate to end before its place is given away
MOST_STUCK = 32  # threads that may be left behind; beyond that, a place stays taken until its thread has ended

FINGERPRINT_LIMIT_S = 20.0  # for one fingerprint
FRESH_S = 5.0  # a fingerprint holds this long for the same command with other numbers: a sweep needs only one

CancelTrial = Callable[[TaskId], None]
Fingerprint = Callable[[EstimateRequest], str]


def default_places(memory: Memory) -> int:
    """Trial runs at a time: half of the cores, as far as the host's memory allows; two at least."""
    host_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return max(2, min(len(os.sched_getaffinity(0)) // 2, host_mib // (2 * memory.trial_memory_mib)))


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
        self._rotation = UserRotation(memory.estimators_at_once or default_places(memory))
        self._begun_s: dict[TaskId, float] = {}  # monotonic; estimates that have a place
        self._waiting: set[TaskId] = set()  # for a place
        self._fingerprint_of: dict[TaskId, str] = {}  # of tasks that are being estimated
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
        finally:
            self._fingerprint_of.pop(task, None)

    async def _ask(self, request: EstimateRequest) -> tuple[Answer, str]:
        if self._fingerprints is not None:
            request = replace(request, fingerprint=await self._fingerprints.of(request))
            self._fingerprint_of[request.task] = request.fingerprint
        answer = await self._ask_quick(request)
        if answer[0] is None and self._slow:
            answer = await self._ask_slow_in_turn(request, answer[1])
        return answer, request.fingerprint

    def close(self) -> None:
        """Called at the end of the daemon. The callers of `ask` cancel their own calls."""
        self._cancel_s = CANCEL_AT_CLOSE_S
        self._quick_thread.close(wait_s=0.0)

    def fingerprint_of(self, task: TaskId) -> str:
        """Fingerprint of the command of a task that is being estimated; "" if it is not known yet."""
        return self._fingerprint_of.get(task, "")

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


class UserRotation:
    """A limited number of places in which users take turns: the next place goes to the user whose last turn was longest
    ago. The requests of one user are served in their order."""

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


class Fingerprints:
    """Fingerprints of what commands would run, computed in a thread for each user: a file system that hangs delays only
    the users whose files are on it, and costs one thread for each of them."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._threads: dict[int, _UserThread] = {}  # by uid

    async def of(self, request: EstimateRequest) -> str:
        """The fingerprint of the command without its numbers, which history compares by itself; "" if unknown."""
        uid = request.owner.uid
        thread = self._threads.get(uid)
        if thread is None:  # not setdefault: each _UserThread() starts a thread
            thread = self._threads[uid] = _UserThread()
        thread.requests += 1
        try:
            async with thread.lock:  # the limit is for one fingerprint, however many requests wait before it
                return "" if thread.hangs else await self._compute(thread, request)
        finally:
            thread.requests -= 1
            if not thread.requests and not thread.hangs and self._threads.get(uid) is thread:
                del self._threads[uid]
                thread.background.close(wait_s=0.0)

    async def _compute(self, thread: _UserThread, request: EstimateRequest) -> str:
        request = replace(request, spec=replace(request.spec, command=pattern(request.spec.command)))
        spec = (request.spec.command, request.spec.directory, request.spec.environment)
        if thread.last is not None and thread.last[0] == spec and time.monotonic() < thread.last[1] + FRESH_S:
            return thread.last[2]
        began_s = time.monotonic()
        thread.current = thread.background.call(lambda: self._fingerprint(request))
        try:
            async with asyncio.timeout(FINGERPRINT_LIMIT_S):
                found = await asyncio.shield(thread.current)
            thread.last = (spec, began_s, found)
            return found
        except TimeoutError:
            log.error("the files that task %d runs did not answer within %g s", request.task, FINGERPRINT_LIMIT_S)
        except Exception as error:
            log.warning("the files that task %d runs could not be read: %s", request.task, error)
        return ""


class _UserThread:
    """Exists while the user has requests, or while its thread hangs."""

    def __init__(self) -> None:
        self.background = BackgroundThread("fingerprints")
        self.lock = asyncio.Lock()
        self.requests = 0
        self.current: asyncio.Future[str] | None = None
        self.last: tuple[object, float, str] | None = None  # the command, when it was read, its fingerprint

    @property
    def hangs(self) -> bool:
        """Whether a computation that is past its limit has not returned."""
        return self.current is not None and not self.current.done()
