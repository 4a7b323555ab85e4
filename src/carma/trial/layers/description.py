"""The description of a model: layers, parameters, batch size. It comes from a trial run or from a model summary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, get_args

from carma.core.model.values import Record

Precision = Literal["fp32", "tf32", "bf16-amp", "fp16-amp", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Attention = Literal["sdpa", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta")


class Layer(Record, frozen=True, kw_only=True):
    """One module without children, or one with parameters of its own, in the order of the forward pass."""

    name: str = ""  # its path in the model; "" if a summary does not contain it
    kind: str  # the class's name: "Conv2d", "Linear", ...
    output: tuple[int, ...] = ()  # of one call, the batch included; empty if a summary does not contain it
    parameters: int = 0
    inputs: tuple[tuple[int, ...], ...] = ()
    attributes: dict[str, str] = {}  # kernel_size, groups, in_features …, as `repr` prints them
    inplace: bool = False


class Described(Record, frozen=True, kw_only=True):
    layers: tuple[Layer, ...]
    batch: int | None = None
    parameters: int | None = None
    input: tuple[int, ...] = ()  # the first tensor that the model was called with
    dtype: str = "float32"  # of the parameters
    autocast: str = ""  # "bfloat16", "float16"; "" without
    optimizer: str = ""  # the class's name; "" where unknown
    optimizer_slots: int | None = None  # number of tensors that it keeps for each parameter
    checkpointing: bool = False
    channels_last: bool = False
    attention: str = ""  # "sdpa": torch's fused function, "eager": scores are stored, "" if unknown
    heads: int | None = None  # of its attention layers
    passes: int = 1  # calls whose outputs a step holds at once, or networks that it trains; the first is described
    config: dict[str, str] = {}  # of a Hugging Face model: model_type, hidden_size, num_hidden_layers, vocab_size …


HALF = ("float16", "bfloat16")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def bytes_each(dtype: str) -> int | None:
    """Bytes of one element of a torch data type; None for a type that is not known."""
    return _BYTES.get(dtype.removeprefix("torch."))


def slots_of(described: Described) -> int:
    """Tensors of the optimizer for each weight. Adam's two if unknown: the most common number, and the largest."""
    return 2 if described.optimizer_slots is None else described.optimizer_slots


class TrainingOptions(Record, frozen=True, kw_only=True):
    """How the model will be trained, which a summary does not contain."""

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
