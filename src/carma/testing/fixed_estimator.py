"""An estimator that always gives the same answer: for the simulator and for tests of what lies above."""

from __future__ import annotations

from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest


class Fixed:
    def __init__(self, answer: Estimate | NoEstimate) -> None:
        self.name = answer.source
        self._answer = answer

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:  # noqa: ARG002 (the protocol's name)
        return self._answer
