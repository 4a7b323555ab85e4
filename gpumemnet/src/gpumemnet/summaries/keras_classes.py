"""Classes of Keras' layers: names that a table cut off, and kernels from parameters and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from gpumemnet.summaries.shapes import Shape

# `#` stands for 1, 2 or 3.
_OF_KERAS = """
Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention Average BatchNormalization Bidirectional
CategoryEncoding CenterCrop Concatenate Dense Dot Dropout ELU EinsumDense Embedding Flatten Functional GRU
GaussianDropout GaussianNoise GroupNormalization GroupQueryAttention GroupedQueryAttention Identity InputLayer LSTM
Lambda LayerNormalization LeakyReLU Masking Maximum Minimum MultiHeadAttention Multiply Normalization PReLU
Permute RMSNormalization RNN ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding Sequential SimpleRNN
Softmax SpectralNormalization Subtract ThresholdedReLU TimeDistributed UnitNormalization AdaptiveAveragePooling#D
AdaptiveMaxPooling#D AveragePooling#D Conv#D Conv#DTranspose ConvLSTM#D Cropping#D DepthwiseConv#D
GlobalAveragePooling#D GlobalMaxPooling#D MaxPooling#D SeparableConv#D SpatialDropout#D UpSampling#D ZeroPadding#D
"""
_NAMES = tuple(_OF_KERAS.split())
_CONVOLUTION = re.compile(r"(Depthwise)?Conv([123])D(Transpose)?")
_OF_SIGNALS = re.compile(r"\w*Conv1D\w*|BatchNormalization")
_OF_ROWS = re.compile(r"\w*(Dense|Embedding|Attention|LSTM|GRU|RNN|Bidirectional|TimeDistributed)\w*")


def full_name(cut: str, places: int) -> str:
    """Of a class whose name was cut off; `places`: number of sizes besides batch and channels (2 of an image).
    Unchanged if it is no class of Keras."""
    names = [name.replace("#", str(places)) for name in _NAMES]
    return next((name for name in names if name.startswith(cut)), cut)


def of_signals(kinds: Iterable[str]) -> Iterator[bool]:
    """Whether three sizes mean a signal with channels, or a sequence: as for the last layer of either kind.
    `carma.trial.layers.column_reading` does the same."""
    signals = False
    for kind in kinds:
        signals = bool(_OF_SIGNALS.fullmatch(kind)) or (signals and not _OF_ROWS.fullmatch(kind))
        yield signals


def attributes_of(kind: str, parameters: int, fed: Shape, made: Shape) -> dict[str, str]:
    """Attributes with PyTorch's names, as far as they follow from the parameters and the shapes (channels first)."""
    found = _CONVOLUTION.fullmatch(kind)
    if kind == "Dense" and fed and made:
        return {"in_features": str(fed[-1]), "out_features": str(made[-1])}
    if found is None or not made:
        return {}
    channels = 1 if len(made) in (4, 5) else -1
    given = made[channels]
    if len(fed) != len(made):
        return {"out_channels": str(given)}
    places, taken = int(found[2]), fed[channels]
    told = {"in_channels": str(taken), "out_channels": str(given)}
    if found[1]:
        told["groups"] = str(taken)
    side = _side(parameters, given if found[1] else taken * given, given, places)
    return told if side is None else {**told, "kernel_size": str((side,) * places)}


def _side(parameters: int, each: int, biases: int, places: int) -> int | None:
    """The side of a square kernel, with or without a bias; None if the parameters do not fit."""
    for weights in (parameters - biases, parameters):
        if each > 0 and weights > 0 and weights % each == 0:
            side = round(math.pow(weights // each, 1 / places))
            if math.prod([side] * places) * each == weights:
                return side
    return None
