"""Kinds of layers by their effect on memory, from the class names of PyTorch, Hugging Face, timm, Keras and ONNX."""

from __future__ import annotations

import re
from functools import lru_cache

KINDS = (
    "linear", "convolution", "grouped", "transposed", "batch_norm", "norm", "activation", "rectifier", "dropout",
    "pooling", "max_pooling", "embedding", "attention", "softmax", "shape", "upsampling", "merge", "other",
)  # fmt: skip
INDEX = {name: place for place, name in enumerate(KINDS)}
PRODUCTS = ("linear", "convolution", "grouped", "transposed", "attention")
TORCH_ATTENTION = "MultiheadAttention"

# The first match counts. Recurrent layers are not in the data, so models with them are refused.
_RULES = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(LSTM|GRU|RNN|SimpleRNN|Bidirectional|ConvLSTM\w*)(Cell)?|\w*Mamba\w*", "recurrent"),
        (r"Depthwise\w*|ConvDepthwise\w*", "grouped"),
        (r"(Lazy)?ConvTranspose\w*|Conv[123]DTranspose", "transposed"),
        (r"Conv1D", "conv1d"),  # of Keras a convolution, of Hugging Face a linear layer
        (r"(Lazy|Separable|Parametrized)?Conv[123]?[dD]?(Same|Bn|Norm|Simple|NoTemporal)?|\w+Conv2d", "convolution"),
        (r"\w*Linear|Dense|EinsumDense|Bilinear|Gemm|MatMul", "linear"),
        (r"\w*(Multi[hH]ead|Multiscale|GroupedQuery|Window|Relative)Attention\w*|(Additive)?Attention", "attention"),
        (r"((Sync|Lazy|Frozen)?Batch|Instance)Norm(alization|[123]d)?\w*", "batch_norm"),
        (r"\w*(LayerNorm|RMSNorm|GroupNorm|LocalResponseNorm|UnitNorm)\w*|\w+Norm", "norm"),
        (r"\w*(Dropout|DropPath|StochasticDepth|DropConnect)\w*|GaussianNoise", "dropout"),
        (r"(Log)?Softmax\w*|Softmin", "softmax"),
        (r"\w*Max\w*Pool\w*", "max_pooling"),
        (r"\w*Pool\w*", "pooling"),
        (r"\w*Up[sS]ampl\w*|Interpolate|Resize|PixelShuffle|Fold", "upsampling"),
        (r"\w*Rotary\w*|\w*Sinusoidal\w*", "shape"),
        (r"\w*Embeddings?(Bag)?\d?", "embedding"),
        (r"Add|Concat\w*|Cat|Multiply|Mul|Average|Maximum|Sub\w*|FloatFunctional|Merge", "merge"),
        (r"\w*(Flatten|Identity|Reshape|Permute|Padding|Pad[123]d|Cropping|Input|Unfold|Shuffle|Resc)\w*", "shape"),
        # The first ones keep their output for the backward pass, the others their input.
        (r"ReLU|Relu|[Ss]igmoid|Tanh", "rectifier"),
        (
            r"\w*(ReLU6?|Relu|GELU\w*|Gelu|SiLU\w*|Swish\w*|ELU|Elu|[Ss]igmoid|Tanh\w*|Mish\w*|Softplus|Softsign|shrink"
            r"|HardTanh|Hardtanh|Hardswish|HardSwish|GLU|Activation|Threshold|Swish|QuickGELU\w*)",
            "activation",
        ),
    )
)  # fmt: skip


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """One of KINDS, or `recurrent`, or `conv1d`, which means two kinds."""
    return next((kind for pattern, kind in _RULES if pattern.fullmatch(name)), "other")


# As in the published features, an activation function is an angle; adjacent functions are similar.
_FUNCTIONS = (
    ("ReLU", r"Re?LU|Relu|re_lu\w*"), ("ReLU6", r"ReLU6|Relu6"), ("LeakyReLU", r"Leaky\w*"), ("PReLU", r"PReLU|PRelu"),
    ("ELU", r"ELU|Elu"), ("CELU", r"CELU"), ("SELU", r"SELU|Selu"), ("GELU", r"\w*G[Ee][Ll][Uu]\w*"),
    ("SiLU", r"SiLU\w*|Swish\w*|MemoryEfficientSwish"), ("Mish", r"Mish\w*"), ("Hardswish", r"Hard[Ss]wish"),
    ("Softplus", r"Softplus"), ("Softsign", r"Softsign"), ("Sigmoid", r"(Hard|Log)?[Ss]igmoid"),
    ("Tanh", r"\w*Tanh\w*"),
)  # fmt: skip
_FUNCTION_RULES = tuple((name, re.compile(pattern)) for name, pattern in _FUNCTIONS)
FUNCTIONS = tuple(name for name, _ in _FUNCTIONS)


@lru_cache(maxsize=4096)
def function_of(name: str) -> int | None:
    """The activation function as an index in FUNCTIONS; None if it is unknown."""
    found = (place for place, (_, pattern) in enumerate(_FUNCTION_RULES) if pattern.fullmatch(name))
    return next(found, None)
