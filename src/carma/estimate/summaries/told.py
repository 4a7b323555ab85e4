"""What no summary tells of a training run: optimizer, precision, attention and the like. Said by whoever asks."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec.structs import replace

from carma.core.model import Record
from carma.estimate.summaries.read import Read

Precision = Literal["fp32", "tf32", "bf16-amp", "fp16-amp", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Attention = Literal["sdpa", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
# The class in torch.optim, and the tensors of a parameter's size that it keeps for each.
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
# The parameters' type, and autocast's. TF32 is a way to multiply: its numbers lie in memory like those of fp32.
_TYPES: dict[Precision, tuple[str, str]] = {
    "fp32": ("float32", ""),
    "tf32": ("float32", ""),
    "bf16-amp": ("float32", "bfloat16"),
    "fp16-amp": ("float32", "float16"),
    "bf16": ("bfloat16", ""),
}


class Told(Record, frozen=True, kw_only=True):
    optimizer: str | None = None
    precision: Precision | None = None
    checkpointing: bool = False
    channels_last: bool = False
    attention: Attention | None = None
    heads: int | None = None


def completed(read: Read, told: Told) -> Read:
    """The model as it will be trained. What nobody said is taken as it most often is, and a remark says so."""
    described, remarks = read.described, list(read.remarks)
    if told.optimizer is not None or described.optimizer_slots is None:
        name, slots = OPTIMIZERS[told.optimizer or _USUAL]
        described = replace(described, optimizer=name, optimizer_slots=slots)
        if told.optimizer is None:
            remarks.append("no summary tells the optimizer: taken to be Adam (--optimizer names another)")
    dtype, autocast = _TYPES[told.precision] if told.precision else (described.dtype, "")
    trained = replace(
        described,
        dtype=dtype,
        autocast=autocast,
        checkpointing=told.checkpointing,
        channels_last=told.channels_last,
        attention=told.attention or described.attention,
        heads=told.heads or described.heads,
    )
    return Read(described=trained, remarks=tuple(remarks))
