"""Trial runs that can be cancelled one by one, for example when their task is cancelled.

A trial that was cancelled raises an exception and is not a refusal: refusals are cached for a while, and the same
command may be submitted again at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from carma.core.model.settings import Memory
from carma.core.model.values import NoEstimate, TaskId
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described
from carma.trial.protocol import Trial
from carma.trial.sandbox import Sandbox, SandboxResult, SandboxRun
from carma.trial.trial_run import TrialRuns


class TrialCancelled(Exception):
    """Must not be cached as a refusal."""


class DaemonTrials:
    """Implements trial.protocol.Trials, with `cancel`. Each run has a sandbox of its own."""

    def __init__(self, cache_dir: Path, memory: Memory, make: Callable[..., TrialRuns] = TrialRuns) -> None:
        self._lock = threading.Lock()
        self._runs: dict[TaskId, list[_Run]] = {}
        self._thread = threading.local()  # `run` is the run of this thread
        sandbox = _SandboxPerRun(lambda: self._thread.run)
        self._trials = make(cache_dir, memory.trial_limit_s, memory.trial_memory_mib, sandbox=sandbox)

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        with self._registered(request.task):
            return self._trials.run(request)

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        with self._registered(request.task):
            return self._trials.describe(request)

    def cancel(self, task: TaskId) -> None:
        """End the runs of this task, also those that have not reached their sandbox yet."""
        with self._lock:
            runs = list(self._runs.get(task, ()))
        for run in runs:
            run.cancel()

    @contextmanager
    def _registered(self, task: TaskId) -> Iterator[None]:
        run = self._thread.run = _Run()
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
    """One call; while its command runs, also the sandbox in which it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._sandbox is not None:
                self._sandbox.close()

    def within(self, sandbox: Sandbox, command: SandboxRun) -> SandboxResult:
        with self._lock:
            if self._cancelled:
                raise TrialCancelled("the trial was cancelled before it began")
            self._sandbox = sandbox
        ended = sandbox.run(command)
        with self._lock:
            self._sandbox = None
            if self._cancelled:
                raise TrialCancelled("the trial was cancelled")
        return ended


class _SandboxPerRun(Sandbox):
    """A new sandbox for each run, so that one can be closed without the others."""

    def __init__(self, current: Callable[[], _Run]) -> None:
        super().__init__()
        self._current = current

    def run(self, what: SandboxRun) -> SandboxResult:
        return self._current().within(Sandbox(self.launcher), what)
