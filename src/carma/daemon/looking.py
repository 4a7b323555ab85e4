"""Looks at what commands would run, in a thread for each user: a drive that hangs holds up nobody but those whose files
lie on it, and one thread for each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from carma.core.pattern import pattern
from carma.core.ports import EstimateRequest
from carma.daemon.worker import Worker

log = logging.getLogger("carma.daemon")

LOOK_LIMIT_S = 20.0

Fingerprint = Callable[[EstimateRequest], str]


class Looks:
    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._eyes: dict[int, _Eye] = {}  # by uid

    async def at(self, request: EstimateRequest) -> str:
        """The fingerprint of the command without its numbers, which history compares by itself; "" where none can be
        had."""
        uid = request.owner.uid
        eye = self._eyes.setdefault(uid, _Eye())
        eye.asked += 1
        try:
            async with eye.turn:  # so that the limit is for one look, however many there are before it
                return "" if eye.hangs else await self._look(eye, request)
        finally:
            eye.asked -= 1
            if not eye.asked and not eye.hangs and self._eyes.get(uid) is eye:
                del self._eyes[uid]
                eye.worker.close(wait_s=0.0)

    async def _look(self, eye: _Eye, request: EstimateRequest) -> str:
        blank = replace(request, spec=replace(request.spec, command=pattern(request.spec.command)))
        eye.looking = eye.worker.call(lambda: self._fingerprint(blank))
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                return await asyncio.shield(eye.looking)
        except TimeoutError:
            log.error("what task %d runs did not answer within %g s", request.task, LOOK_LIMIT_S)
        except Exception as error:
            log.warning("what task %d runs could not be looked at: %s", request.task, error)
        return ""


class _Eye:
    """The thread of one user's looks, as long as there are any."""

    def __init__(self) -> None:
        self.worker = Worker("looking")
        self.turn = asyncio.Lock()
        self.asked = 0
        self.looking: asyncio.Future[str] | None = None

    @property
    def hangs(self) -> bool:
        """The last look has not come back, although nobody waits for it any more."""
        return self.looking is not None and not self.looking.done()
