"""The rule of Hugging Face accelerate (`accelerate estimate-memory`, column "Training using Adam").

In float32 it counts the weights, their gradients and Adam's two moments: four times the weights. With half precision
its table shows the largest of its four figures, the optimizer's step: twice the float32 weights.
"""

from __future__ import annotations

from functools import partial

from carma.trial.layers.description import Described
from gpumemnet.published.common import Found, Parts, Published, of_model, parameters_of

_FULL_BYTES = 4
_HALF = ("float16", "bfloat16")
_WARNINGS = ("leaves out activations, workspaces and the CUDA context, and takes the optimizer for Adam",)


@of_model
def _accelerate(described: Described, _gpus: int) -> Found:
    weights = _FULL_BYTES * parameters_of(described)
    dtype = described.autocast or described.dtype
    if dtype in _HALF:
        return Parts({"optimizer step": 2 * weights}, _WARNINGS)
    if dtype == "float32":
        return Parts({"weights": weights, "gradients": weights, "optimizer": 2 * weights}, _WARNINGS)
    return f"the rule has no figure for training in {dtype}"


make = partial(Published, "accelerate", _accelerate)
