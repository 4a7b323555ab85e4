"""Estimates in the caller's own process: no daemon, no store, only the caller's rights.

Several estimators share one trial run: the first that needs it runs it, and its time counts for each that used it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from carma.core.model.settings import Rules
from carma.core.model.values import Estimate, NoEstimate, Record
from carma.core.ports import EstimateRequest, Estimator
from carma.estimate.combination import first_answer
from carma.paths import find_paths
from carma.trial.layers.description import Described
from carma.trial.protocol import Trial, Trials
from carma.trial.trial_reasons import Kind, kind_of
from carma.trial.trial_run import TrialRuns

STEPS = 3  # the first creates the optimizer's state, the second shows the peak, the third confirms it

CLEARLY = 1.5  # factor over the time now from which a trial run counts as cached


class EstimatorAnswer(Record, frozen=True, kw_only=True):
    """The answer of one estimator and its time, including its part of a shared trial run."""

    estimator: str
    result: Estimate | NoEstimate
    took_s: float
    kind: Kind | None = None  # of a refusal whose cause is the trial run
    remembered_s: float | None = None  # time of a cached trial run when it was made


class Summarised:
    """Replaces the model by its summary. A command, if there is one, can still be run."""

    def __init__(self, described: Described, trials: Trials | None) -> None:
        self._described = described
        self._trials = trials

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        if self._trials is None:
            return NoEstimate(source="trace", reason="there is a summary and no command that could be run")
        return self._trials.run(request)

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:  # noqa: ARG002 (the protocol's name)
        return self._described


class SharedTrial:
    """One trial run for several estimators; `borrowed_s` is its time if another estimator ran it."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._ran: Trial | NoEstimate | None = None
        self._described: Described | NoEstimate | None = None
        self._seconds = 0.0
        self.borrowed_s = 0.0
        self.asked = False

    def begin(self) -> None:
        """Prepares for the next estimator."""
        self.borrowed_s = 0.0
        self.asked = False

    def kind_of(self, result: Estimate | NoEstimate) -> Kind | None:
        """The kind of failure, if a refusal repeats the reason of the trial run."""
        ran = self._ran if self.asked else None
        if ran is None or isinstance(result, Estimate):
            return None
        reason = ran.report.reason if isinstance(ran, Trial) else ran.reason
        return kind_of(ran) if result.reason == reason else None

    def remembered_s(self) -> float | None:
        """The time of a cached trial run: one that ran now cannot have taken longer than the call."""
        ran = self._ran
        if not self.asked or not isinstance(ran, Trial) or ran.seconds < CLEARLY * self._seconds:
            return None
        return ran.seconds

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        self.asked = True
        if self._ran is None:
            started_s = time.monotonic()
            self._ran = self._trials.run(request)
            self._seconds = time.monotonic() - started_s
        else:
            self.borrowed_s = self._seconds
        return self._ran

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        ran = self.run(request)  # so that a trial that failed is not tried again for the model alone
        if isinstance(ran, NoEstimate):
            return ran
        if self._described is None:
            self._described = self._trials.describe(request)
        return self._described


def answers(
    estimators: Sequence[Estimator], request: EstimateRequest, shared: SharedTrial
) -> Iterator[EstimatorAnswer]:
    """The answers in order; errors of an estimator become refusals."""
    for estimator in estimators:
        shared.begin()
        started_s = time.monotonic()
        estimate, refusals = first_answer((estimator,), request)
        took_s = time.monotonic() - started_s + shared.borrowed_s
        result = refusals[0] if estimate is None else estimate
        yield EstimatorAnswer(
            estimator=estimator.name,
            result=result,
            took_s=took_s,
            kind=shared.kind_of(result),
            remembered_s=shared.remembered_s(),
        )


def make_trials(rules: Rules, environ: Mapping[str, str], steps: int | None) -> TrialRuns:
    """Trial runs with the limits of the rules, cached in the caller's own cache directory."""
    memory = rules.memory
    return TrialRuns(
        cache_dir=cache_directory(environ),
        limit_s=memory.trial_limit_s,
        memory_mib=memory.trial_memory_mib,
        steps=steps or STEPS,
    )


def cache_directory(environ: Mapping[str, str]) -> Path:
    """`~/.cache/carma`, or below CARMA_HOME; not the daemon's directory, which may be another user's."""
    if environ.get("CARMA_HOME"):
        return find_paths(environ).state_dir / "cache"
    given = environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(environ.get("HOME") or os.path.expanduser("~")) / ".cache"
    return base / "carma"
