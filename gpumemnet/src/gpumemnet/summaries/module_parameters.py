"""Parameters of modules, from what `print(model)` shows of them (after torch.nn's documentation)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import prod
from typing import TypeVar

_DIGITS = 18
_NUMBER = re.compile(rf"\d{{1,{_DIGITS}}}", re.ASCII)
_NEGATIVE = re.compile(r"(?<![\w.])-\d", re.ASCII)  # not the exponent of 1e-05
_ENDLESS = re.compile(rf"(?<![\d.])\d{{{_DIGITS + 1}}}", re.ASCII)
_SIZES = ("0", "1", "in_features", "in1_features", "in2_features", "out_features", "nf", "nx", "kernel_size", "groups",
          "num_parameters", "num_layers", "proj_size")  # fmt: skip
Printed = Mapping[str, str]  # the text in a module's brackets: by name, or by position ("0", "1", …)
Rule = TypeVar("Rule")
NAMES_CACHED = 4096  # names come from the text, so caches of them are limited


def by_name(rules: Mapping[str, Rule]) -> Callable[[str], Rule | None]:
    """Looks up class names: the value of the first pattern that matches, else None."""
    compiled = [(re.compile(pattern), rule) for pattern, rule in rules.items()]
    return lru_cache(NAMES_CACHED)(
        lambda kind: next((rule for pattern, rule in compiled if pattern.fullmatch(kind)), None)
    )


def named(pattern: str) -> Callable[[str], bool]:
    """Tests whether a class name matches."""
    whole = re.compile(pattern)
    return lru_cache(NAMES_CACHED)(lambda kind: whole.fullmatch(kind) is not None)


# Modules of torch.nn and of common packages without children and without parameters.
is_plain = named(
    r"(?!PReLU)((Fractional|Adaptive)?(Max|Avg|LP)(Un)?[Pp]ool\w*|.*Dropout\w*|.*DropPath|StochasticDepth|.*Pad[123]d|.*Loss"
    r"|\w*(ReLU6?|[GSC]?ELU|SiLU|GLU|Tanh|[Ss]igmoid|[Ss]wish|[Ss]oftmax|[Ss]oftplus|Softsign|Softmin|shrink|Mish)"
    r"(2d|Activation)?|Threshold|Identity|Flatten|Unflatten|Fold|Unfold|Upsample\w*|UpsamplingNearest2d"
    r"|UpsamplingBilinear2d|PixelShuffle|PixelUnshuffle|ChannelShuffle|Permute|LocalResponseNorm|CrossMapLRN2d"
    r"|CosineSimilarity|PairwiseDistance|Softmax2d|FrozenBatchNorm2d|LinearActivation|LaplaceActivation"
    r"|ReLUSquaredActivation|\w*Rotary\w*Embedding|Quant|DeQuant|QuantStub|DeQuantStub|Tanhshrink|Interpolate)"
)
# Also without parameters, but they may contain modules.
_is_bare = named(
    r"(?!\w*Att)\w*Pool(ing)?([123]d)?(Same)?|FrozenBatchNormAct2d|SpaceToDepth|DepthToSpace|\w*Permute\w*"
)
# One or two parameters for each channel. The number of channels is not printed.
_SCALES = {"LayerScale": 1, "LayerScale2d": 1, "Scale": 1, "Affine": 2}
# The name implies weights, so that none may be omitted.
_implies_weights = named(
    r"\w*(Linear|Conv|Attention|Attn|Expert|Norm|Dense|LSTM|GRU|RNN|Cell|Mamba|Mixer|Mlp|MLP|Block|Layer)\w*"
)
_is_layer = named(r"\w*Linear\w*|\w*Norm(alization)?|MultiheadAttention")
_holds_projections = named(r"ShiftedWindowAttention(V2)?|MultiheadAttention")
has_activation = named(r"\w*Norm1?Act\w*")  # of timm: a norm with its activation as a module inside
is_recurrent = named(r"(LSTM|GRU|RNN)(Cell)?")  # torchsummary does not count its weights, nor does its output show them
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList")


def is_container(kind: str) -> bool:
    return kind in _CONTAINERS


def count_parameters(kind: str, printed: Printed) -> int | None:
    """None if the brackets do not show it; 0 for modules without parameters."""
    if is_plain(kind) or is_container(kind) or _is_bare(kind):
        return 0
    count = _rule(kind)
    try:
        return None if count is None else count(printed)
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        return None


def impossible(kind: str, printed: Printed) -> str | None:
    """Why the printed sizes of a layer with weights are impossible; None if they are possible."""
    for value in (printed[key] for key in _SIZES if key in printed) if _rule(kind) else ():
        if _NEGATIVE.search(value):
            return "a size is negative"
        if _ENDLESS.search(value):
            return f"a size has more than {_DIGITS} digits"
    return None


def scales(kind: str) -> int:
    """Parameters for each channel, if only that is known; 0 for any other module."""
    return _SCALES.get(kind, 0)


def is_bare_norm(kind: str, printed: Printed) -> bool:
    """Whether it is a norm like T5's, which prints nothing; it is as wide as the linear layer before it."""
    return not printed and kind.endswith("T5LayerNorm")


def uncounted(kind: str, shape: tuple[int, ...]) -> int:
    """Weights that torchsummary does not count because no called module owns them: projections of queries, keys, values
    and the output, each with a bias. 0 for any other module."""
    return 4 * shape[-1] * (shape[-1] + 1) if shape and _holds_projections(kind) else 0


def may_be_small(kind: str) -> bool:
    """Whether its name implies no layer: it may have a few parameters (a table of positions), or none."""
    return _rule(kind) is None and not _implies_weights(kind)


def width_made(printed: Printed) -> int:
    """Output channels of a layer with weights; 0 if the brackets do not show them."""
    text = next((printed[key] for key in ("out_features", "nf", "1", "0") if key in printed), "")
    found = integers(text)
    return found[-1] if found else 0


def holds_weights(kind: str) -> bool:
    """Whether it is a layer with parameters of its own and without modules inside, as far as its name shows."""
    return _rule(kind) is not None or _is_layer(kind)


def integers(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text)]


def _yes(printed: Printed, name: str, default: bool = True) -> bool:
    return printed.get(name, str(default)) == "True"


def _convolution(printed: Printed) -> int:
    taken, given = int(printed["0"]), int(printed["1"])
    groups = int(printed.get("groups", "1"))
    # The weight of a transposed one is in × out/groups instead of out × in/groups: the same product.
    weight = taken * given // groups * prod(integers(printed["kernel_size"]))
    return weight + (given if _yes(printed, "bias") else 0)


def _linear(*taken: str) -> Callable[[Printed], int]:
    """`taken`: names of the sizes of its inputs."""

    def count(printed: Printed) -> int:
        given = int(printed["out_features"])
        return prod(int(printed[name]) for name in taken) * given + (given if _yes(printed, "bias") else 0)

    return count


def _sizes(printed: Printed) -> int:
    return prod(integers(printed["0"]))


def _affine(width: int, printed: Printed, word: str) -> int:
    """Weight and bias; older torch does not print the bias, which then exists."""
    if not _yes(printed, word):
        return 0
    return width * (2 if _yes(printed, "bias") else 1)


def _recurrent(gates: int, printed: Printed) -> int:
    """Each layer and direction: gates × hidden × (input + hidden), and two biases; a projection shrinks the output."""
    taken, hidden = int(printed["0"]), int(printed["1"])
    projected = int(printed.get("proj_size", "0"))
    directions = 2 if _yes(printed, "bidirectional", False) else 1
    biases = 2 * gates * hidden if _yes(printed, "bias") else 0
    fed_back = projected or hidden
    own = fed_back * gates * hidden + biases + projected * hidden  # of a layer and direction, without its input
    further = int(printed.get("num_layers", "1")) - 1
    widths = taken + further * fed_back * directions
    return directions * (gates * hidden * widths + (further + 1) * own)


_RULES: Mapping[str, Callable[[Printed], int]] = {
    r"(Std|Deform)?Conv[123]d(Same)?|ConvTranspose[123]d|Conv3D(Simple|NoTemporal)": _convolution,
    # With a gain for each output channel.
    r"ScaledStdConv2d(Same)?": lambda printed: _convolution(printed) + int(printed["1"]),
    r"(NonDynamicallyQuantizable)?Linear": _linear("in_features"),
    r"Bilinear": _linear("in1_features", "in2_features"),
    r"Conv1D": lambda printed: int(printed["nf"]) * int(printed["nx"]) + int(printed["nf"]),
    r"(Sync)?BatchNorm(Act)?([123]d)?|InstanceNorm[123]d": lambda printed: _affine(
        int(printed["0"]), printed, "affine"
    ),
    r"GroupNorm1?(Act)?": lambda printed: _affine(int(printed["1"]), printed, "affine"),
    r"LayerNorm(Act)?(2d)?(Fp32)?": lambda printed: _affine(_sizes(printed), printed, "elementwise_affine"),
    r"\w*RMSNorm|\w*T5LayerNorm|(Rms|Simple)Norm(Act)?(2d)?(Fp32)?": (
        lambda printed: _sizes(printed) if _yes(printed, "elementwise_affine") else 0
    ),
    r"(\w*Embedding|EmbeddingBag)": lambda printed: int(printed["0"]) * int(printed["1"]),
    r"LSTM(Cell)?": partial(_recurrent, 4),
    r"GRU(Cell)?": partial(_recurrent, 3),
    r"RNN(Cell)?": partial(_recurrent, 1),
    "PReLU": lambda printed: int(printed["num_parameters"]),
}
_rule = by_name(_RULES)
