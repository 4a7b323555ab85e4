"""The model of a summary's text or ONNX file. Reading them is the gpumemnet distribution's; the types are here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, get_args

from carma.core.model.values import Record
from carma.trial.layers.description import Described

Precision = Literal["fp32", "tf32", "bf16-amp", "fp16-amp", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Attention = Literal["sdpa", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta")


class TrainingOptions(Record, frozen=True, kw_only=True):
    """How the model will be trained: a summary does not contain it."""

    optimizer: str | None = None
    precision: Precision | None = None
    checkpointing: bool = False
    channels_last: bool = False
    attention: Attention | None = None
    heads: int | None = None


class ReadSummary(Record, frozen=True, kw_only=True):
    described: Described
    remarks: tuple[str, ...] = ()  # assumptions that make the description less certain; sentences without a full stop
    gaps: tuple[str, ...] = ()  # what the summary lacks, and how to print a complete one; also printed with a refusal
    frozen: int = 0  # parameters that are not trained
    is_partial: bool = False  # layers may be missing, in which case no bound holds


class SummaryReader(Protocol):
    """The extension `model-summary`: reads a file, or the bytes of standard input. Raises Usage for other text."""

    def __call__(
        self, source: Path | bytes, options: TrainingOptions, *, batch: int | None, sample: tuple[int, ...]
    ) -> ReadSummary: ...
