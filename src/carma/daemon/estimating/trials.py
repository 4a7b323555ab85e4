"""Trial runs that can be called off one by one: when a task is cancelled, nobody wants to know what it would take.

A trial that was called off is an exception here and not a refusal: refusals are remembered for a while, and the same
command may be submitted again at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from carma.core.model.settings import Memory
from carma.core.model.values import NoEstimate, TaskId
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described
from carma.trial.protocol import Trial
from carma.trial.sandbox import Boxed, Ended, Sandbox
from carma.trial.trial_run import TrialRuns

T = TypeVar("T")


class CalledOff(Exception):
    """Nobody waits for this trial any more."""


class DaemonTrials:
    """Implements estimate.protocol.Trials, with `cancel`. Each run is a box of its own."""

    def __init__(self, cache_dir: Path, memory: Memory, make: Callable[..., TrialRuns] = TrialRuns) -> None:
        self._lock = threading.Lock()
        self._runs: dict[TaskId, list[_Run]] = {}
        self._here = threading.local()  # the run that this thread is at
        self._trials = make(
            cache_dir, memory.trial_limit_s, memory.trial_memory_mib, sandbox=_Boxes(lambda: self._here.run)
        )

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        with self._noted(request.task):
            return self._trials.run(request)

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        with self._noted(request.task):
            return self._trials.describe(request)

    def cancel(self, task: TaskId) -> None:
        """End what runs for that task; it may also be on its way to the box, and then does not get there."""
        with self._lock:
            runs = list(self._runs.get(task, ()))
        for run in runs:
            run.call_off()

    @contextmanager
    def _noted(self, task: TaskId) -> Iterator[None]:
        run = self._here.run = _Run()
        with self._lock:
            self._runs.setdefault(task, []).append(run)
        try:
            yield
        finally:
            with self._lock:
                self._runs[task].remove(run)
                if not self._runs[task]:
                    del self._runs[task]


class _Run:
    """One call; while its command runs, the box that it runs in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._box: Sandbox | None = None
        self._off = False

    def call_off(self) -> None:
        with self._lock:
            self._off = True
            if self._box is not None:
                self._box.close()

    def within(self, box: Sandbox, what: Boxed) -> Ended:
        with self._lock:
            if self._off:
                raise CalledOff("the trial was called off before it began")
            self._box = box
        ended = box.run(what)
        with self._lock:
            self._box = None
            if self._off:
                raise CalledOff("the trial was called off")
        return ended


class _Boxes(Sandbox):
    """A box for each run, so that one can be ended without the others."""

    def __init__(self, current: Callable[[], _Run], launcher: Sequence[str] | None = None) -> None:
        super().__init__(*(() if launcher is None else (launcher,)))
        self._current = current

    def run(self, what: Boxed) -> Ended:
        return self._current().within(Sandbox(self.launcher), what)
