"""Fingerprints of what commands would run, computed in a thread for each user: a file system that hangs delays only
the users whose files are on it, and costs one thread for each of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from carma.core.model.command_pattern import pattern
from carma.core.ports import EstimateRequest
from carma.daemon.runtime import BackgroundThread

log = logging.getLogger("carma.daemon")

LIMIT_S = 20.0  # for one fingerprint
FRESH_S = 5.0  # a fingerprint holds this long for the same command with other numbers: a sweep needs only one

Fingerprint = Callable[[EstimateRequest], str]


class Fingerprints:
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
                return "" if thread.hangs else await self._compute(thread, _without_numbers(request))
        finally:
            thread.requests -= 1
            if not thread.requests and not thread.hangs and self._threads.get(uid) is thread:
                del self._threads[uid]
                thread.background.close(wait_s=0.0)

    async def _compute(self, thread: _UserThread, request: EstimateRequest) -> str:
        spec = (request.spec.command, request.spec.directory, request.spec.environment)
        if thread.last is not None and thread.last[0] == spec and time.monotonic() < thread.last[1] + FRESH_S:
            return thread.last[2]
        began_s = time.monotonic()
        thread.current = thread.background.call(lambda: self._fingerprint(request))
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await asyncio.shield(thread.current)
            thread.last = (spec, began_s, found)
            return found
        except TimeoutError:
            log.error("the files that task %d runs did not answer within %g s", request.task, LIMIT_S)
        except Exception as error:
            log.warning("the files that task %d runs could not be read: %s", request.task, error)
        return ""


def _without_numbers(request: EstimateRequest) -> EstimateRequest:
    return replace(request, spec=replace(request.spec, command=pattern(request.spec.command)))


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
