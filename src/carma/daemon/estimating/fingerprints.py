"""Looks at what commands would run, in a thread for each user: a drive that hangs holds up nobody but those whose files
lie on it, and one thread for each of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from carma.core.model.command_pattern import pattern
from carma.core.ports import EstimateRequest
from carma.daemon.background_thread import Worker

log = logging.getLogger("carma.daemon")

LOOK_LIMIT_S = 20.0
FRESH_S = 5.0  # so long a look counts for the same command with other numbers: a sweep is submitted at once

Fingerprint = Callable[[EstimateRequest], str]


class Looks:
    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._eyes: dict[int, _Eye] = {}  # by uid

    async def at(self, request: EstimateRequest) -> str:
        """The fingerprint of the command without its numbers, which history compares by itself; "" where none can be
        had."""
        uid = request.owner.uid
        eye = self._eyes.get(uid)
        if eye is None:  # not setdefault: each _Eye() starts a thread
            eye = self._eyes[uid] = _Eye()
        eye.asked += 1
        try:
            async with eye.turn:  # so that the limit is for one look, however many there are before it
                return "" if eye.hangs else await self._look(eye, _blank(request))
        finally:
            eye.asked -= 1
            if not eye.asked and not eye.hangs and self._eyes.get(uid) is eye:
                del self._eyes[uid]
                eye.worker.close(wait_s=0.0)

    async def _look(self, eye: _Eye, request: EstimateRequest) -> str:
        spec = (request.spec.command, request.spec.directory, request.spec.environment)
        if eye.last is not None and eye.last[0] == spec and time.monotonic() < eye.last[1] + FRESH_S:
            return eye.last[2]
        began_s = time.monotonic()
        eye.looking = eye.worker.call(lambda: self._fingerprint(request))
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                found = await asyncio.shield(eye.looking)
            eye.last = (spec, began_s, found)
            return found
        except TimeoutError:
            log.error("what task %d runs did not answer within %g s", request.task, LOOK_LIMIT_S)
        except Exception as error:
            log.warning("what task %d runs could not be looked at: %s", request.task, error)
        return ""


def _blank(request: EstimateRequest) -> EstimateRequest:
    return replace(request, spec=replace(request.spec, command=pattern(request.spec.command)))


class _Eye:
    """The thread of one user's looks, as long as there are any."""

    def __init__(self) -> None:
        self.worker = Worker("looking")
        self.turn = asyncio.Lock()
        self.asked = 0
        self.looking: asyncio.Future[str] | None = None
        self.last: tuple[object, float, str] | None = None  # what was looked at, when, and what was found

    @property
    def hangs(self) -> bool:
        """The last look has not come back, although nobody waits for it any more."""
        return self.looking is not None and not self.looking.done()
