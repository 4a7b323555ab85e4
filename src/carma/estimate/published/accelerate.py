"""The rule of Hugging Face accelerate (`accelerate estimate-memory`, column "Training using Adam").

In float32 the weights, their gradients and Adam's two moments: four times the weights. With half precision its table
shows the largest of its four figures, the optimizer's step: twice the float32 weights.
"""

from __future__ import annotations

from carma.core.model import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.estimate.protocol import Context, Trials
from carma.estimate.published.answer import answer, parameters_of, under

_FULL_BYTES = 4
_HALF = ("float16", "bfloat16")
_WARNINGS = ("leaves out activations, workspaces and the CUDA context, and takes the optimizer for Adam",)


class Accelerate:
    name = "accelerate"

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        described = self._trials.describe(request)
        if isinstance(described, NoEstimate):
            return under(self.name, described)
        weights = _FULL_BYTES * parameters_of(described)
        dtype = described.autocast or described.dtype
        if dtype in _HALF:
            parts = {"optimizer step": 2 * weights}
        elif dtype == "float32":
            parts = {"weights": weights, "gradients": weights, "optimizer": 2 * weights}
        else:
            return NoEstimate(source=self.name, reason=f"the rule has no figure for training in {dtype}")
        return answer(self.name, parts, warnings=_WARNINGS)


def make(context: Context) -> Accelerate:
    return Accelerate(context.trials)
