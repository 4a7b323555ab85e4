"""The columns of a data-set file: names, types, units and meaning, as in the data card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from carma.errors import Refused

FORMAT = "1"
LICENCE = "Apache-2.0"
Kind = Literal["word", "whole", "number", "switch", "wholes", "words", "switches", "shapes", "big", "bigs"]


class Column(NamedTuple):
    name: str
    kind: Kind
    about: str
    unit: str = ""
    optional: bool = False  # null if it was not measured


SETTINGS = (
    Column("id", "word", "family, seed and number; unique"),
    Column("family", "word", "mlp, cnn or transformer"),
    Column("shape", "word", "what the generator meant: pyramid, residual, encoder …"),
    Column("batch", "whole", "samples of a step", "samples"),
    Column("input", "wholes", "shape of one sample; the number of tokens where vocabulary is not 0"),
    Column("vocabulary", "whole", "of the tokens that go in; 0: real numbers go in", "tokens"),
    Column("target", "whole", "tokens of an encoder-decoder's second input; 0: none", "tokens"),
    Column("outputs", "whole", "classes, or values"),
    Column("loss", "word", "classes (one a sample), tokens (one a token), pixels (one a pixel) or values"),
    Column("optimizer", "word", "sgd, momentum, adam, adamw, rmsprop or adagrad"),
    Column("precision", "word", "fp32, tf32, bf16-amp, fp16-amp or bf16"),
    Column("checkpointing", "switch", "blocks are computed again in the backward pass"),
    Column("channels_last", "switch", "images and weights lie in memory with the channels last"),
    Column("guess_mib", "whole", "the generator's rough figure of the footprint", "MiB"),
    Column("config", "word", "the whole config as a line of JSON, from which the model is built"),
)
LAYERS = (
    Column("parameters", "big", "of the model, each once"),
    Column("tied_parameters", "big", "counted in two layers, because they share them"),
    Column("inside_parameters", "big", "in no layer: a module computes with them without calling their own"),
    Column("layer_kind", "words", "of each layer in the order of the forward pass: its class"),
    Column("layer_output", "shapes", "of each layer: shape of what it gives, the batch included"),
    Column("layer_input", "shapes", "of each layer: shape of the first tensor that it takes"),
    Column("layer_parameters", "bigs", "of each layer: its own parameters"),
    Column("layer_attributes", "words", "of each layer: kernel_size, stride, groups …, as JSON"),
    Column("layer_inplace", "switches", "of each layer: whether it writes over its input"),
    Column("edge_from", "wholes", "of each edge: the layer whose output …"),
    Column("edge_to", "wholes", "… reached this layer's input, through sums and views too"),
)
MEMORY = (
    Column("allocated_mib", "number", "peak of what tensors took", "MiB", True),
    Column("requested_mib", "number", "peak of what was asked for, before the allocator rounds up", "MiB", True),
    Column("reserved_mib", "number", "peak of what the allocator held", "MiB", True),
    Column("footprint_mib", "number", "what NVML says of the process: reserved, context, libraries", "MiB", True),
    Column("context_mib", "number", "the CUDA context alone, before the model", "MiB", True),
    Column("steps", "whole", "that were taken"),
    Column("retries", "whole", "how often the allocator gave its cache back because the card was full"),
    Column("oom", "switch", "it did not fit on the card, alone; the figures are those until then"),
    Column("alone", "switch", "nothing else was on the card"),
)
ACTIVITY = (
    Column("step_ms", "number", "median time of a step, alone on the card", "ms", True),
    Column("sm_active", "number", "SMs with at least one warp", "0 to 1", True),
    Column("sm_occupancy", "number", "resident warps of those that fit", "0 to 1", True),
    Column("gr_active", "number", "time in which the compute engine was busy", "0 to 1", True),
    Column("dram_active", "number", "memory bandwidth in use", "0 to 1", True),
    Column("tensor_active", "number", "tensor cores in use", "0 to 1", True),
    Column("power_w", "number", "of the whole card", "W", True),
)
COLUMNS = (*SETTINGS, *LAYERS, *MEMORY, *ACTIVITY)
CONFIG_COLUMNS = tuple(column.name for column in SETTINGS if column.name != "config")  # each a field of Config
PLAIN = ("whole", "big", "number", "switch")  # one number for each row
# Long rising sequences: their differences need fewer bits than a dictionary.
DELTAS = ("edge_from.list.element", "edge_to.list.element", "layer_parameters.list.element")
DICTIONARIES = ("layer_kind.list.element", "layer_attributes.list.element")

_TYPES = {"word": "string", "whole": "int32", "big": "int64", "number": "float64", "switch": "bool"}
_ELEMENTS: Mapping[Kind, Kind] = {
    "wholes": "whole", "bigs": "big", "words": "word", "switches": "switch", "shapes": "wholes",
}  # fmt: skip


def pyarrow() -> Any:
    """pyarrow, imported only when needed: neither the daemon nor most verbs use it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        missing = "pyarrow is not installed, so Parquet files can be neither read nor written"
        raise Refused(missing, "pip install pyarrow") from error
    return pyarrow


def schema() -> Any:
    arrow = pyarrow()
    return arrow.schema([arrow.field(column.name, _type(column.kind), column.optional) for column in COLUMNS])


def _type(kind: Kind) -> Any:
    arrow = pyarrow()
    if kind in _ELEMENTS:
        return arrow.list_(arrow.field("element", _type(_ELEMENTS[kind]), False))
    return arrow.type_for_alias(_TYPES[kind])
