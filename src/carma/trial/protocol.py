"""What an estimator plugin is: a function `make(context) -> Estimator`, registered under `carma.estimators`.

The estimator itself has one method, `estimate(request)`, and answers with an Estimate or a NoEstimate (a refusal is a
good answer). It may take seconds: it is called in a thread of its own, never in the daemon's loop. One of
`memory.estimators_at_once` places is waited for first, and users take turns.

An estimator that always answers at once has the attribute `quick = True`. It is then called without waiting for a
place, as long as none before it in `memory.sources` is slow. A slow estimator with this attribute delays the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from carma.core.model.settings import Rules
from carma.core.model.values import Gpu, NoEstimate
from carma.core.ports import Archive, EstimateRequest, Estimator
from carma.trial.layers.description import Described
from carma.trial.report import TrialReport


@dataclass(frozen=True)
class Trial:
    """The result of a trial run: the report, and the events for `report.read_events`."""

    report: TrialReport
    events: bytes
    seconds: float


class Trials(Protocol):
    """Runs a command on an emulated GPU; the same command with the same files runs once."""

    def run(self, request: EstimateRequest) -> Trial | NoEstimate: ...

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        """The model of that command, or of a summary that replaces it."""
        ...


class NoTrials:
    """Trials of servers that make no trial runs."""

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
