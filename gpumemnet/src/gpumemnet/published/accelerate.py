"""The rule of Hugging Face accelerate (`accelerate estimate-memory`, column "Training using Adam").

In float32 it counts the weights, their gradients and Adam's two moments: four times the weights. With half precision
its table shows the largest of its four figures, the optimizer's step: twice the float32 weights.
"""

from __future__ import annotations

from carma.core.model.values import Estimate, NoEstimate
from carma.trial.layers.description import Described
from carma.trial.protocol import Context
from gpumemnet.published.common import OfModel, answer, parameters_of

_FULL_BYTES = 4
_HALF = ("float16", "bfloat16")
_WARNINGS = ("leaves out activations, workspaces and the CUDA context, and takes the optimizer for Adam",)


class Accelerate(OfModel):
    name = "accelerate"

    def of(self, described: Described, gpus: int) -> Estimate | NoEstimate:  # noqa: ARG002 (as the others have it)
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
