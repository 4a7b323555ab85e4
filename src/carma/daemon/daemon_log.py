"""The daemon's own log: the few lines that the administrator of a server needs.

1. `log_event` logs the events that concern the whole server or show a problem.
2. `FaultLog` logs when a GPU fails and when it works again.
3. `ErrorLog` logs an error that repeats once per minute, with the number of repetitions.

The log never contains what a user's program printed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from carma.core.model import events as e
from carma.core.model.outcome import Disrupted, LaunchFailed, Lost, OutOfMemory
from carma.core.model.values import GpuId, GpuSample
from carma.core.state import State
from carma.daemon.views.story import as_on_record, sentence
from carma.errors import CarmaError

log = logging.getLogger("carma.daemon")

SAME_ERROR_S = 60.0
_MOST_KINDS = 100


def log_event(event: e.Durable, state: State) -> None:
    match event:
        case (
            e.GpusFound()
            | e.GpuDrained()
            | e.GpuResumed()
            | e.RecoveryPlanned()
            | e.PreemptionRequested()
            | e.PreemptionMissed()
            | e.TaskPaused()
            | e.TaskUnpaused()
            | e.StopRequested(ending=OutOfMemory() | Disrupted())
            | e.AttemptEnded(outcome=Disrupted())
            | e.TaskFinished(outcome=OutOfMemory() | LaunchFailed() | Lost() | Disrupted())
        ):
            log.info("%s", sentence(as_on_record(event, state.tasks), state.gpus))
        case _:
            return


class FaultLog:
    def __init__(self) -> None:
        self._faults: dict[GpuId, str | None] = {}

    def observe(self, samples: Iterable[GpuSample], state: State) -> None:
        for sample in samples:
            gpu = state.gpus.get(sample.gpu)
            if gpu is None or sample.fault == self._faults.get(sample.gpu):
                continue
            if sample.fault is None:
                log.info("GPU %d can be used again", gpu.index)
            else:
                log.info("GPU %d cannot be used: %s", gpu.index, sample.fault)
            self._faults[sample.gpu] = sample.fault


@dataclass
class _Count:
    total: int = 0
    unlogged: int = 0
    logged_at_s: float = float("-inf")


class ErrorLog:
    """One line per kind of error and period. Also the exception handler of an event loop: asyncio may report the same
    error thousands of times per second, for example when no descriptor is left for a new connection."""

    def __init__(self, period_s: float = SAME_ERROR_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._now_s = now_s
        self._counts: dict[str, _Count] = {}

    def error(self, line: str, *, kind: str, error: BaseException | None = None) -> None:
        """`error` is logged with its traceback, unless it is a CarmaError or OSError: those explain themselves."""
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            self._counts.clear()
        count = self._counts.setdefault(kind, _Count())
        count.total += 1
        if self._now_s() - count.logged_at_s < self._period_s:
            count.unlogged += 1
            return
        more = f" (and {count.unlogged} similar errors since the last such line)" if count.unlogged else ""
        log.error("%s", line + more, exc_info=None if isinstance(error, CarmaError | OSError) else error)
        count.logged_at_s, count.unlogged = self._now_s(), 0

    def over(self, kind: str, line: str) -> None:
        """Log the success that follows errors of this kind, if there were any."""
        count = self._counts.pop(kind, None)
        if count is not None:
            log.info("%s, after %s", line, "1 failure" if count.total == 1 else f"{count.total} failures")

    def __call__(self, _loop: object, context: Mapping[str, object]) -> None:
        error = context.get("exception")
        line = str(context.get("message", "error in the event loop"))
        if isinstance(error, BaseException):
            line += f": {type(error).__name__}: {error}"
        self.error(line, kind=line, error=error if isinstance(error, Exception) else None)
