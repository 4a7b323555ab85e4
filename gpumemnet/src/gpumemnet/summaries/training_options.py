"""Adds what no summary contains of a training run: optimizer, precision, attention, as given by the user."""

from __future__ import annotations

import re

from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer, Precision, ReadSummary, TrainingOptions

# The class in torch.optim, and its number of tensors for each parameter.
OPTIMIZERS: dict[str, tuple[str, int]] = {
    "sgd": ("SGD", 0),
    "momentum": ("SGD", 1),
    "adam": ("Adam", 2),
    "adamw": ("AdamW", 2),
    "rmsprop": ("RMSprop", 1),
    "adagrad": ("Adagrad", 1),
    "nadam": ("NAdam", 2),
    "radam": ("RAdam", 2),
    "adamax": ("Adamax", 2),
    "adadelta": ("Adadelta", 2),
}
_USUAL = "adam"
_MIB = 1 << 20
_FEW = 0.01  # of the parameters: fewer frozen ones are not worth a remark
_ATTENDS = re.compile(r"attn|attention", re.IGNORECASE)
_OF_ROWS = re.compile(r"\w*Linear|Conv1D|Dense|EinsumDense|MatMul|Gemm")
# Types of the parameters and of autocast. TF32 is a way to multiply: its numbers are stored as fp32.
TYPES: dict[Precision, tuple[str, str]] = {
    "fp32": ("float32", ""),
    "tf32": ("float32", ""),
    "bf16-amp": ("float32", "bfloat16"),
    "fp16-amp": ("float32", "float16"),
    "bf16": ("bfloat16", ""),
}


def completed(read: ReadSummary, options: TrainingOptions) -> ReadSummary:
    """The model as it will be trained. Unknown options get their most common value, with a remark."""
    described, remarks = read.described, list(read.remarks)
    if options.optimizer is not None or described.optimizer_slots is None:
        name, slots = OPTIMIZERS[options.optimizer or _USUAL]
        described = replace(described, optimizer=name, optimizer_slots=slots)
        if options.optimizer is None:
            remarks.append("no summary tells the optimizer: taken to be Adam (--optimizer names another)")
    dtype, autocast = TYPES[options.precision] if options.precision else (described.dtype, "")
    trained = replace(
        described,
        dtype=dtype,
        autocast=autocast,
        checkpointing=options.checkpointing,
        channels_last=options.channels_last,
        attention=options.attention or described.attention,
        heads=options.heads or described.heads,
    )
    if (options.attention or options.heads) and not _may_attend(described):
        trained = replace(trained, attention="", heads=None)
        remarks.append("the model has no attention: --attention and --heads change nothing")
    remarks += _frozen(trained, read.frozen)
    return replace(read, described=trained, remarks=tuple(remarks))


def _may_attend(described: Described) -> bool:
    """Whether there can be attention, which is between positions: not if products have only the batch."""
    if not any(layer.output for layer in described.layers):
        return True
    return any(_is_between(layer) for layer in described.layers)


def _is_between(layer: Layer) -> bool:
    if _ATTENDS.search(layer.kind) or _ATTENDS.search(layer.name):
        return True
    return len(layer.output) > 2 and _OF_ROWS.fullmatch(layer.kind) is not None


def _frozen(described: Described, frozen: int) -> list[str]:
    """A remark, because a description does not contain which weights are frozen."""
    if frozen <= _FEW * (described.parameters or 0):
        return []
    each = 2 if described.dtype in ("bfloat16", "float16") else 4
    mib = round(frozen * each * (1 + (described.optimizer_slots or 0)) / _MIB)
    problem = f"{frozen:,} parameters are frozen and are counted as trained"
    return [f"{problem}: about {mib:,} MiB of gradients and optimizer state are too much"]
