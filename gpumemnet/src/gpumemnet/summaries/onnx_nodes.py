"""Turns nodes of an ONNX graph into layers with PyTorch's names.

Views (Reshape, Transpose) and computations of shapes (integers) are no layers. A weight belongs to the first node that
takes it, also through a Transpose, and counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from msgspec.structs import replace

from carma.trial.layers.description import Layer
from gpumemnet.summaries.shapes import Shape

Tensors = dict[str, tuple[Shape | None, int]]  # by name: shape, type
FLOATS = (1, 10, 11, 16)  # TensorProto.DataType: FLOAT, FLOAT16, DOUBLE, BFLOAT16
_VIEWS = (
    "Constant", "ConstantOfShape", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice",
    "Split", "Expand", "Shape", "Size", "Cast", "CastLike", "DequantizeLinear", "QuantizeLinear",
)  # fmt: skip
_KINDS = {
    "Gemm": "Linear", "BatchNormalization": "BatchNorm#d", "InstanceNormalization": "InstanceNorm#d",
    "GroupNormalization": "GroupNorm", "LayerNormalization": "LayerNorm", "RMSNormalization": "RMSNorm",
    "SimplifiedLayerNormalization": "RMSNorm", "SkipLayerNormalization": "LayerNorm", "LRN": "LocalResponseNorm",
    "Conv": "Conv#d", "ConvTranspose": "ConvTranspose#d", "MaxPool": "MaxPool#d", "AveragePool": "AvgPool#d",
    "GlobalAveragePool": "AdaptiveAvgPool#d", "GlobalMaxPool": "AdaptiveMaxPool#d", "LpPool": "LPPool#d",
    "Relu": "ReLU", "LeakyRelu": "LeakyReLU", "PRelu": "PReLU", "Elu": "ELU", "Selu": "SELU", "Celu": "CELU",
    "Gelu": "GELU", "FastGelu": "GELU", "BiasGelu": "GELU", "QuickGelu": "QuickGELU", "Swish": "SiLU",
    "HardSwish": "Hardswish", "HardSigmoid": "Hardsigmoid", "LogSoftmax": "LogSoftmax", "Clip": "ReLU6",
    "Resize": "Upsample", "DepthToSpace": "PixelShuffle", "Pad": "ZeroPad#d",
}  # fmt: skip


_OF_TRAINING = ("BatchNormalization", "Dropout", "RandomUniformLike", "Bernoulli")
_ACTIVATIONS = (
    "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Clip", "Sigmoid", "HardSwish", "HardSigmoid", "Tanh",
    "Softplus", "Mish", "Swish",
)  # fmt: skip
_SUBGRAPH = 5  # AttributeProto.GRAPH


class Graph:
    """`weights` are the initializers by name, `shapes` the known shapes of all other tensors."""

    def __init__(self, nodes: Iterable[Any], weights: Mapping[str, tuple[Shape, int]], shapes: Tensors) -> None:
        self._nodes = list(nodes)
        self._weights = {name: shape for name, (shape, kind) in weights.items() if kind in FLOATS and shape}
        self._shapes = shapes
        self._uses = Counter(name for node in self._nodes for name in node.input)
        self._counted: set[str] = set()
        self._find_weights()
        self.parameters = 0
        self.unknown: list[str] = []  # nodes with outputs of unknown shape
        self.nested = next((_told(node) for node in self._nodes if _holds_layers(node)), "")
        self.is_folded = self._has_folded()
        self.is_for_training = not self.is_folded and any(node.op_type in _OF_TRAINING for node in self._nodes)

    def layers(self, fixed: int | None, batch: int | None) -> tuple[Layer, ...]:
        """Layers in the order of the graph. A batch that was fixed in the export is replaced by the requested one."""
        found: list[Layer] = []
        biased: dict[str, int] = {}  # index of the layer by the output of a product without its bias
        for node in self._nodes:
            if node.op_type in _VIEWS or not self._makes_numbers(node):
                continue
            if node.op_type == "Add" and self._is_bias(node, biased):
                place = next(biased[name] for name in node.input if name in biased)
                found[place] = _with_bias(found[place], self._take(node))
                continue
            layer = self._layer(node, fixed, batch)
            if layer.kind == "Linear" and node.op_type == "MatMul" and self._uses[node.output[0]] == 1:
                biased[node.output[0]] = len(found)
            found.append(layer)
        return tuple(found)

    def _find_weights(self) -> None:
        """Finds weights and views of weights."""
        self._behind = {name: name for name in self._weights}
        for node in self._nodes:
            if node.op_type in _VIEWS and node.input and node.input[0] in self._behind:
                self._behind[node.output[0]] = self._behind[node.input[0]]

    def _makes_numbers(self, node: Any) -> bool:
        """Integers are shapes, indices and masks. Computations of weights alone are done once."""
        known = self._shapes.get(node.output[0]) if node.output else None
        if known is None:
            return bool(node.output)  # an operator that ONNX does not have
        return known[1] in FLOATS and known[0] != ()

    def _has_folded(self) -> bool:
        """A convolution without a bias, or with one that the exporter created, has a norm after it in training. Only
        the module's own bias has a name like its weight."""
        takers: dict[str, list[str]] = {}
        for node in self._nodes:
            for name in node.input:
                takers.setdefault(name, []).append(node.op_type)
        for node in self._nodes:
            if node.op_type == "Conv" and not _has_own_bias(node):
                behind = takers.get(node.output[0], ())
                if any(kind in _ACTIVATIONS for kind in behind):
                    return True
        return False

    def _is_bias(self, node: Any, biased: dict[str, int]) -> bool:
        added = [name for name in node.input if name not in biased]
        return len(added) == 1 and len(self._weights.get(self._behind.get(added[0], ""), (0, 0))) == 1

    def _take(self, node: Any) -> int:
        """Parameters that this node is the first to take. The averages of a batch norm are no parameters."""
        names = node.input[:3] if node.op_type == "BatchNormalization" else node.input
        own = {self._behind[name] for name in names if name in self._behind} - self._counted
        self._counted |= own
        count = sum(prod(self._weights[name]) for name in own if prod(self._weights[name]) > 1)
        self.parameters += count
        return count

    def _layer(self, node: Any, fixed: int | None, batch: int | None) -> Layer:
        def scaled(name: str) -> Shape:
            shape = self._shapes.get(name, (None, 0))[0] or ()
            return (batch, *shape[1:]) if batch and shape and shape[0] == fixed else shape

        output = scaled(node.output[0])
        if not output:
            self.unknown.append(_told(node))
        fed = [name for name in node.input if name and name not in self._behind]
        inputs = tuple(shape for shape in map(scaled, fed[:2]) if shape)
        kind, attributes = self._kind(node, output or (inputs[0] if inputs else ()))
        return Layer(
            name=node.name or node.output[0],
            kind=kind,
            output=output,
            parameters=self._take(node),
            inputs=inputs[:1],
            attributes=attributes,
        )

    def _kind(self, node: Any, shape: Shape) -> tuple[str, dict[str, str]]:
        op = node.op_type
        weights = [self._weights[self._behind[name]] for name in node.input if name in self._behind]
        large = next((weight for weight in weights if len(weight) > 1), ())
        if op == "Gather" and node.input[0] in self._behind and len(large) == 2:
            return "Embedding", {"num_embeddings": str(large[0]), "embedding_dim": str(large[1])}
        if op in ("MatMul", "Gemm") and len(large) == 2:
            given = shape[-1] if shape and shape[-1] in large else large[1]
            return "Linear", {"in_features": str(prod(large) // given), "out_features": str(given)}
        if op in ("Conv", "ConvTranspose") and large:
            return _KINDS[op].replace("#", str(len(large) - 2)), _convolution(node, large)
        return _KINDS.get(op, op).replace("#", str(max(len(shape) - 2, 1))), {}


def _told(node: Any) -> str:
    return f"the node {node.name or node.output[0]!r} ({node.op_type})"


def _holds_layers(node: Any) -> bool:
    """Whether it is a branch or a loop with more than views inside."""
    bodies = [attribute.g for attribute in node.attribute if attribute.type == _SUBGRAPH]
    return any(inner.op_type not in _VIEWS or _holds_layers(inner) for body in bodies for inner in body.node)


def _has_own_bias(node: Any) -> bool:
    """Whether it has a bias with torch's name. An export for inference invents names for precomputed values."""
    if len(node.input) < 3 or not node.input[2]:
        return False
    weight, bias = node.input[1], node.input[2]
    return bool(bias == weight.removesuffix("weight") + "bias" != "bias")


def _convolution(node: Any, weight: Shape) -> dict[str, str]:
    """Attributes as in print(model). The weight of a transposed one has its sizes swapped."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    groups = attributes["group"].i if "group" in attributes else 1
    one, other = weight[0], weight[1] * groups
    taken, given = (one, other) if node.op_type == "ConvTranspose" else (other, one)
    found = {"in_channels": str(taken), "out_channels": str(given), "kernel_size": str(weight[2:])}
    if "strides" in attributes:
        found["stride"] = str(tuple(attributes["strides"].ints))
    return {**found, "groups": str(groups)}


def _with_bias(layer: Layer, biases: int) -> Layer:
    return replace(layer, parameters=layer.parameters + biases)
