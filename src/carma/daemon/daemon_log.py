"""What the daemon's own log says of what happens: the few lines that somebody who looks after a server wants.

Nothing of a program's own words goes in here. An error that repeats is told once a minute, with how often it came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from carma.core.model.events import (
    AttemptEnded,
    Durable,
    GpuDrained,
    GpuResumed,
    GpusFound,
    PreemptionMissed,
    PreemptionRequested,
    RecoveryPlanned,
    StopRequested,
    TaskFinished,
)
from carma.core.model.outcome import Disrupted, LaunchFailed, Lost, OutOfMemory
from carma.core.model.values import GpuId, GpuSample
from carma.core.state import State
from carma.daemon.views.task_story import as_on_record, sentence

log = logging.getLogger("carma.daemon")

SAME_ERROR_S = 60.0
_KINDS_OF_ERRORS = 100


class Journal:
    def __init__(self) -> None:
        self._faults: dict[GpuId, str] = {}

    def happened(self, event: Durable, state: State) -> None:
        """GPUs that come, go, are drained or resumed; tasks that memory, MPS or fate ended."""
        match event:
            case GpusFound() | GpuDrained() | GpuResumed() | RecoveryPlanned():
                log.info("%s", sentence(event, state.gpus))
            case StopRequested(ending=OutOfMemory() | Disrupted()):
                log.info("%s", sentence(event, state.gpus))
            case PreemptionRequested() | PreemptionMissed():
                log.info("%s", sentence(event, state.gpus))
            case (
                AttemptEnded(outcome=Disrupted())
                | TaskFinished(outcome=OutOfMemory() | LaunchFailed() | Lost() | Disrupted())
            ):
                log.info("%s", sentence(as_on_record(event, state.tasks), state.gpus))
            case _:
                return

    def seen(self, samples: Iterable[GpuSample], state: State) -> None:
        """A GPU that cannot be used any more, or can be again."""
        for sample in samples:
            gpu = state.gpus.get(sample.gpu)
            if gpu is None or sample.fault == self._faults.get(sample.gpu):
                continue
            if sample.fault is None:
                del self._faults[sample.gpu]
                log.info("GPU %d can be used again", gpu.index)
            else:
                self._faults[sample.gpu] = sample.fault
                log.info("GPU %d cannot be used: %s", gpu.index, sample.fault)


class Seldom:
    """One kind of error that may come many times a second."""

    def __init__(self, every_s: float = SAME_ERROR_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._told_s = float("-inf")
        self._since = 0  # how often it came and was not told
        self._all = 0

    def error(self, line: str) -> None:
        self._all += 1
        if self._now_s() - self._told_s < self._every_s:
            self._since += 1
            return
        log.error("%s", line + (f" (and {self._since} more like it since the last such line)" if self._since else ""))
        self._told_s, self._since = self._now_s(), 0

    def over(self, line: str) -> None:
        """It went well: say so, if it had not before."""
        if self._all:
            log.info("%s, after %s", line, "1 failure" if self._all == 1 else f"{self._all} failures")
            self._told_s, self._since, self._all = float("-inf"), 0, 0


class LoopErrors:
    """The event loop's exception handler. asyncio reports the same error thousands of times a second, for example when
    no descriptor is left for a new connection; one line a minute says as much."""

    def __init__(self, every_s: float = SAME_ERROR_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._known: dict[str, Seldom] = {}

    def __call__(self, _loop: object, context: Mapping[str, object]) -> None:
        error = context.get("exception")
        line = str(context.get("message", "error in the event loop"))
        if isinstance(error, BaseException):
            line += f": {type(error).__name__}: {error}"
        if len(self._known) >= _KINDS_OF_ERRORS:
            self._known.clear()
        if line not in self._known:
            self._known[line] = Seldom(self._every_s, self._now_s)
            if isinstance(error, Exception) and not isinstance(error, OSError):
                log.error("%s", line, exc_info=error)
                return
        self._known[line].error(line)
