"""The settings of the generator of configs: the ranges and weights from which it draws models. They are read from a
TOML file (`ranges.toml` explains each key) and checked; an error names the key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from carma.errors import Usage
from carma.trial.layers.description import Precision
from gpumemnet.dataset.config import Optimizer

DEFAULTS = Path(__file__).with_name("ranges.toml")

Positive = Annotated[int, msgspec.Meta(ge=1)]
Span = tuple[Positive, Positive]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Above = Annotated[float, msgspec.Meta(gt=0)]
Counts = dict[Positive, Weight]  # numbers with the weights by which they are drawn
# As in inside/build.py, which needs torch.
Activation = Literal[
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus",
    "softsign", "hardswish", "hardsigmoid", "hardtanh", "logsigmoid", "tanhshrink", "prelu",
]  # fmt: skip
INPLACE = ("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh")
Rate = Literal["fp32", "tf32", "bf16-amp", "fp16-amp", "bf16", "convolution", "grouped"]
MlpShape = Literal["gradual", "pyramid", "bottleneck", "uniform", "hourglass", "residual", "dense"]
CnnShape = Literal[
    "plain", "pyramid", "uniform", "gradual", "hourglass", "unet", "residual", "bottleneck", "grouped", "dense",
    "inverted", "inception", "convnext",
]  # fmt: skip
TransformerShape = Literal["encoder", "gpt", "decoder", "llama", "seq2seq", "vit"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, tuple) and not value:
                raise ValueError(f"`{name}` is empty")
            if isinstance(value, tuple) and len(value) == 2 and value[0] > value[1]:
                raise ValueError(f"`{name}` begins with {value[0]} and ends with {value[1]}")
            if isinstance(value, dict) and not sum(value.values()) > 0:
                raise ValueError(f"all weights of `{name}` are 0, so nothing can be drawn")


class Common(Section, frozen=True):
    tries: Positive
    context_mib: Positive
    slack: Above
    step_s: Above
    tensor_elements: Positive
    input_elements: Positive
    rates: dict[Rate, Above]  # assumed arithmetic of the GPU, in 10^12 operations per second
    batches: dict[Literal["any", "power", "eights"], Weight]
    optimizers: dict[Optimizer, Weight]
    precisions: dict[Precision, Weight]


class Footprint(Section, frozen=True):
    span_mib: Span
    low_mib: Span
    high_mib: Span
    log: Share
    low: Share
    high: Share


class FamilyRanges(Section, frozen=True):
    """What is drawn for every family."""

    footprint: Footprint
    batch: Span
    widths: Span
    dropout: Share
    functional: Share
    activations: dict[Activation, Weight]


class Mlp(FamilyRanges, frozen=True):
    shapes: dict[MlpShape, Weight]
    layers: Span
    deep_layers: Span
    deep: Share
    inputs: Span
    outputs: Span
    norms: dict[Literal["none", "batch", "layer"], Weight]
    dropouts: tuple[Share, Share]
    inplace: Share
    values: Share
    values_outputs: Span
    bias: Share


class Cnn(FamilyRanges, frozen=True):
    shapes: dict[CnnShape, Weight]
    convolutions: Span
    stages: Span
    width_cap: Positive
    image: Span
    images: tuple[Positive, ...]
    usual_image: Share
    oblong: Share
    signal: Share
    signal_length: Span
    signal_channels: Span
    volume: Share
    volume_side: Span
    channels: Counts
    classes: Span
    norms: dict[Literal["none", "batch", "group", "instance"], Weight]
    group_counts: Counts
    kernels: Counts
    stem_kernels: Counts
    stem_strides: Counts
    stem_pool: Share
    shrinks: dict[Literal["stride", "max", "avg"], Weight]
    heads: dict[Literal["pool", "flatten", "convolution", "pixels"], Weight]
    flat_widths: Span
    pixel_classes: Span
    growths: Span
    groups: Counts
    expansions: Counts
    rows: Share
    excite: Share
    dropouts: tuple[Share, Share]
    inplace: Share
    conv_bias: Share
    channels_last: Share
    checkpointing: Share


class Transformer(FamilyRanges, frozen=True):
    shapes: dict[TransformerShape, Weight]
    blocks: Span
    head_sizes: Counts
    ratios: dict[Above, Weight]
    sequence: Span
    sequences: tuple[Positive, ...]
    usual_sequence: Share
    eager_sequence: Positive
    vocabulary: Span
    vocabularies: tuple[Positive, ...]
    usual_vocabulary: Share
    classes: Span
    tied: Share
    eager: Share
    causal_styles: dict[Literal["split", "fused", "torch", "conv1d"], Weight]
    styles: dict[Literal["split", "fused", "torch"], Weight]
    kv_shares: Counts
    pre_norm: Share
    parallel: Share
    gated: Share
    rms: Share
    bias: Share
    dropouts: dict[Share, Weight]
    masked: Share
    head_transform: Share
    image: Span
    patches: Counts
    checkpointing: Share


class Ranges(Section, frozen=True):
    common: Common
    mlp: Mlp
    cnn: Cnn
    transformer: Transformer


def load_ranges(path: Path | None = None) -> Ranges:
    """The defaults, with the values of the user's file in place of them."""
    tree = _parsed(DEFAULTS)
    if path is not None:
        tree = _merged(tree, _parsed(path))
    try:
        return msgspec.convert(tree, Ranges, str_keys=True)
    except msgspec.ValidationError as error:
        raise Usage(f"{path or DEFAULTS}: {error}", f"{DEFAULTS} has every key, with a comment.") from error


def _parsed(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", "--ranges takes a TOML file.") from error
    except UnicodeDecodeError as error:
        raise Usage(f"{path} is no text: {error}", "--ranges takes a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise Usage(f"{path} is not TOML: {error}", f"{DEFAULTS} shows what it may look like.") from error


def _merged(under: dict[str, object], over: dict[str, object], depth: int = 0) -> dict[str, object]:
    """Merges sections key by key. A table of weights is replaced as a whole, so that words can be left out."""
    merged = {**under, **over}
    for key, value in over.items():
        old = under.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and (depth == 0 or key == "footprint"):
            merged[key] = _merged(old, value, depth + 1)
    return merged
