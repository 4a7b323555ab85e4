"""Graphs of operators (ONNX, Keras) as the lists of modules that the data set has.

A trial run, torchinfo and print(model) list modules. A sum, a join, the products inside attention and the parts of a
function that an exporter took to pieces are none: the same network must give the same list, whoever wrote it down.
Operators follow one another as they are computed, so that their order tells what belongs together.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from msgspec.structs import replace

from carma.estimate.described import Described, Layer
from carma.estimate.gpumemnet.kinds import kind_of

# What exporters leave of functions that they take to pieces; none of them is the name of a module.
_PIECES = frozenset((
    "Div", "Pow", "Sqrt", "Reciprocal", "Erf", "Exp", "Log", "Neg", "Abs", "Sin", "Cos", "Where", "Trilu", "ReduceMean",
    "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "Min", "Max", "Mean", "Sum", "Einsum", "ScatterND", "Tile",
    "Range", "CumSum", "Not", "And", "Equal", "Greater", "Less",
))  # fmt: skip
_GATES = {"Sigmoid": "SiLU", "Tanh": "Mish"}  # times what went into them, or a Softplus of it
_SQUARES = ("Pow", "ReduceMean", "Sqrt", "Reciprocal")  # of a norm that was taken to pieces
_REACH = 7  # operators that such a function is taken to


def as_modules(described: Described) -> Described:
    layers = described.layers
    if not any(_is_piece(layer) for layer in layers):
        return described
    found = tuple(_modules(layers))
    return replace(described, layers=found) if found else described


def _modules(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for place, layer in enumerate(layers):
        behind = layers[place + 1] if place + 1 < len(layers) else None
        if layer.kind in _GATES and behind is not None and _multiplies(behind, layer):
            yield replace(layer, kind=_gated(layers, place))
        elif layer.kind == "Softplus" and behind is not None and behind.kind == "Tanh":
            continue  # the first half of Mish
        elif layer.kind == "Erf":
            yield replace(layer, kind="GELU")
        elif layer.kind == "Softmax" and _is_product(behind):
            continue  # inside attention, which is a function
        elif layer.kind == "ReduceMean" and _pools(layer):
            yield replace(layer, kind="AdaptiveAvgPool2d")
        elif not _is_piece(layer):
            yield layer
        elif layer.parameters > 1:
            is_norm = any(before.kind in _SQUARES for before in layers[max(0, place - _REACH) : place])
            yield replace(layer, kind="RMSNorm") if is_norm else layer


def _is_piece(layer: Layer) -> bool:
    return layer.kind in _PIECES or kind_of(layer.kind) == "merge" or _is_product(layer)


def _is_product(layer: Layer | None) -> bool:
    """Of two outputs: the scores of attention, or what they are for."""
    return layer is not None and layer.kind == "MatMul" and not layer.parameters


def _multiplies(behind: Layer, layer: Layer) -> bool:
    """A gate of another shape than what it opens is a module of its own."""
    return behind.kind in ("Mul", "Multiply") and behind.output == layer.output and not behind.parameters


def _gated(layers: tuple[Layer, ...], place: int) -> str:
    """GELU's other form has a power before its tangent."""
    before = layers[max(0, place - _REACH) : place]
    if layers[place].kind == "Tanh" and not (before and before[-1].kind == "Softplus"):
        return "GELU" if any(one.kind == "Pow" for one in before) else "Tanh"
    return _GATES[layers[place].kind]


def _pools(layer: Layer) -> bool:
    """A mean over an image."""
    given = layer.inputs[0] if layer.inputs else ()
    return len(given) == 4 and prod(layer.output) == prod(given[:2])
