"""The memory formula of Horus (Yeung et al., TPDS 2022, doi 10.1109/tpds.2021.3079202), as CARMA's authors used it.

With A activations of one sample, P parameters and a batch of B: 4 · (A·B + P + B·P) bytes, and 800 MiB that all their
published figures contain (their scripts do not). Gradients are counted once for each sample, so the estimate explodes
for models with many parameters. A is what their parser of model summaries counts: it omits blocks, and pooling layers
that are not adaptive. With the same omissions and the constant, their figures are reproduced to the MiB (ResNet-50 at
batch 32: 7,904; VGG-16 differs by 2 MiB, because their parser reads "4096" as 4 after the linear layers).
"""

from __future__ import annotations

from functools import partial

from carma.trial.layers.description import Described, Layer
from gpumemnet.published.common import Found, Parts, Published, cut_off, no_outputs, numel, of_model, parameters_of

CONSTANT_MIB = 800
_VALUE_BYTES = 4
_WARNINGS = (
    "counts the gradients of the weights once for each sample; far too much for models with many parameters",
    "leaves out optimizer state, workspaces and precision other than float32",
)
_NOT_COUNTED = ("MaxPool", "AvgPool", "LPPool", "FractionalMaxPool", "Flatten", "Unflatten", "Identity")


@of_model
def _horus(described: Described, _gpus: int) -> Found:
    if described.batch is None:
        return "the batch size is not known; the formula needs it"
    if reason := no_outputs(described):
        return reason
    batch, parameters = described.batch, parameters_of(described)
    parts = {
        "activations": _VALUE_BYTES * batch * activations(described),
        "weights": _VALUE_BYTES * parameters,
        "gradients": _VALUE_BYTES * batch * parameters,
    }
    return Parts(parts, _WARNINGS + cut_off(described), fixed_mib={"constant": CONSTANT_MIB})


def activations(described: Described) -> int:
    """Number of activations of one sample, in the layers that the authors count."""
    batch = described.batch or 1
    return sum(_of_sample(layer, batch) for layer in described.layers if not layer.kind.startswith(_NOT_COUNTED))


def _of_sample(layer: Layer, batch: int) -> int:
    if layer.kind.startswith("AdaptiveAvgPool") and len(layer.output) > 1:
        return layer.output[1]  # their parser counts only the channels, whatever the size of the output
    count = numel(layer.output)
    return count // batch if layer.output and layer.output[0] == batch else count


make = partial(Published, "horus", _horus)
