"""The user's own amount (`--gpu-mem`), unchanged: recovery corrects it if it was too small."""

from __future__ import annotations

from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.protocol import Context


class Declared:
    name = "declared"
    quick = True

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        declared = request.spec.gpu_memory_mib
        if declared is None:
            return NoEstimate(source=self.name, reason="the task was submitted without --gpu-mem")
        if declared < 1:
            return NoEstimate(source=self.name, reason=f"{declared} MiB were declared, which no task can run in")
        return Estimate(footprint_mib=declared, upper_mib=declared, source=self.name)


def make(_context: Context) -> Declared:
    return Declared()
