"""What an estimator plugin is: a function `make(context) -> Estimator`, registered under `carma.estimators`.

The estimator itself has one method, `estimate(request)`, and answers with an Estimate or a NoEstimate (a refusal is a
good answer). It may take seconds: it is called in a thread of its own, never in the daemon's loop. One of
`memory.estimators_at_once` places is waited for first, and users take turns.

An estimator that always answers at once says so with an attribute, `quick = True`. It is then asked without waiting for
a place, as long as none before it in `memory.sources` is slow. One that says so and is not quick holds up the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from carma.core.model.settings import Rules
from carma.core.model.values import Gpu, NoEstimate
from carma.core.ports import Archive, EstimateRequest, Estimator
from carma.trial.layers.description import Described
from carma.trial.report import Report


@dataclass(frozen=True)
class Trial:
    """What a trial run of a command told: the report, and the events as `report.read_events` reads them."""

    report: Report
    events: bytes
    seconds: float


class Trials(Protocol):
    """Runs a command with the GPU made up; the same command in the same state of its files is run once."""

    def run(self, request: EstimateRequest) -> Trial | NoEstimate: ...

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        """The model of that command, or the one of a summary that stands in for it."""
        ...


class NoTrials:
    """Where nothing may be run to find out."""

    reason = "trial runs are switched off"

    def run(self, request: EstimateRequest) -> NoEstimate:  # noqa: ARG002 (the protocol's name)
        return NoEstimate(source="trace", reason=self.reason)

    def describe(self, request: EstimateRequest) -> NoEstimate:
        return self.run(request)


@dataclass(frozen=True)
class Context:
    """What a factory may use: past runs, the server's GPUs, the rules in force, and trial runs."""

    archive: Archive
    gpus: tuple[Gpu, ...]
    rules: Rules
    trials: Trials = NoTrials()


Make = Callable[[Context], Estimator]
