"""Turns graphs of operators (ONNX, Keras) into lists of modules, as the data set has them.

A trial run, torchinfo and print(model) list modules. Sums, joins, the products inside attention and the parts of a
function that an exporter split up are no modules: the same network must give the same list from every source.
Operators are listed in the order of computation, so their order shows which belong together. A loss is no layer either:
every run has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer
from carma.trial.layers.kinds import kind_of

# Operators into which exporters split functions; none of them is the name of a module.
_PIECES = frozenset((
    "Div", "Pow", "Sqrt", "Reciprocal", "Erf", "Exp", "Log", "Neg", "Abs", "Sin", "Cos", "Where", "Trilu", "ReduceMean",
    "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "Min", "Max", "Mean", "Sum", "Einsum", "ScatterND", "Tile",
    "Range", "CumSum", "Not", "And", "Equal", "Greater", "Less",
))  # fmt: skip
_SQUARES = ("Pow", "ReduceMean", "Sqrt", "Reciprocal")  # of a norm that was split up
# Modules that multiply each channel by a weight keep their input, as activations do.
_SCALES = ("LayerScale", "LayerScale2d", "Scale", "Affine")
_OF_SCORES = ("Softmax", "Dropout")
_AFTER_SOFTMAX = ("Where", "Dropout")
_BEHIND = 4  # operators after a softmax: of a mask, a dropout, the product
_REACH = 7  # maximum number of operators of such a function


def layers_of(described: Described) -> Described:
    """The layers without those that are no modules; unchanged if none would be left."""
    layers = described.layers
    kinds = {layer.kind for layer in layers}  # few; most networks need none of the following
    if any(map(_is_operator, kinds)) or ("MatMul" in kinds and any(map(_is_product, layers))):
        layers = tuple(_modules(layers))
    if not kinds.isdisjoint(_SCALES):
        layers = tuple(replace(one, kind="Activation") if one.kind in _SCALES else one for one in layers)
    if any(kind.endswith("Loss") for kind in kinds):
        layers = tuple(layer for layer in layers if not layer.kind.endswith("Loss"))
    return replace(described, layers=layers) if layers and layers is not described.layers else described


def _modules(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for place, layer in enumerate(layers):
        behind = layers[place + 1] if place + 1 < len(layers) else None
        if layer.kind in _OF_SCORES and _of_scores(layers, place):
            continue
        if layer.kind in ("Sigmoid", "Tanh"):
            yield replace(layer, kind=_function(layers, place, behind))
        elif layer.kind == "Softplus" and behind is not None and behind.kind == "Tanh":
            continue  # the first half of Mish
        elif layer.kind == "Erf":
            yield replace(layer, kind="GELU")
        elif _is_mask(layer, behind):
            continue
        elif layer.kind == "ReduceMean" and _pools(layer):
            yield replace(layer, kind="AdaptiveAvgPool2d")
        elif not _is_piece(layer):
            yield layer
        elif layer.parameters > 1:
            is_norm = any(kind in _SQUARES for kind in _pieces_before(layers, place))
            yield replace(layer, kind="RMSNorm") if is_norm else layer


def _is_piece(layer: Layer) -> bool:
    return _is_operator(layer.kind) or _is_product(layer)


@lru_cache(maxsize=4096)
def _is_operator(kind: str) -> bool:
    return kind in _PIECES or kind_of(kind) == "merge"


def _is_product(layer: Layer | None) -> bool:
    """Whether it multiplies two outputs: the scores of attention, or their product with the values."""
    return layer is not None and layer.kind == "MatMul" and not layer.parameters


def _is_mask(layer: Layer, behind: Layer | None) -> bool:
    """A mask that is added to attention's scores before their softmax."""
    return kind_of(layer.kind) == "merge" and behind is not None and behind.kind == "Softmax"


def _of_scores(layers: tuple[Layer, ...], place: int) -> bool:
    """Attention is a function: neither its softmax nor the dropout of that is a layer. An exporter may have put
    operators of a mask between them and the product."""
    begin, shape = place, layers[place].output
    while begin and layers[begin].kind in _AFTER_SOFTMAX and layers[begin].output == shape:
        begin -= 1
    if layers[begin].kind != "Softmax" or layers[begin].output != shape:
        return False
    for layer in layers[place + 1 : place + _BEHIND]:
        if layer.kind not in _AFTER_SOFTMAX or layer.output != shape:
            return _is_product(layer)
    return False


def _multiplies(behind: Layer, layer: Layer) -> bool:
    """A gate of another shape than the other factor is a module of its own."""
    return behind.kind in ("Mul", "Multiply") and behind.output == layer.output and not behind.parameters


def _function(layers: tuple[Layer, ...], place: int, behind: Layer | None) -> str:
    """SiLU and Mish are their input times a gate; the approximate GELU has a power before its tangent."""
    layer, before = layers[place], _pieces_before(layers, place)
    if layer.kind == "Tanh" and "Pow" in before:
        return "GELU"
    if behind is None or not _multiplies(behind, layer):
        return layer.kind
    if layer.kind == "Sigmoid":
        return "SiLU"
    return "Mish" if place and layers[place - 1].kind == "Softplus" else "Tanh"


def _pieces_before(layers: tuple[Layer, ...], place: int) -> list[str]:
    """The kinds of the adjacent operators before this place."""
    begin = place
    while begin > max(0, place - _REACH) and _is_operator(layers[begin - 1].kind):
        begin -= 1
    return [layer.kind for layer in layers[begin:place]]


def _pools(layer: Layer) -> bool:
    """A mean over an image."""
    given = layer.inputs[0] if layer.inputs else ()
    return len(given) == 4 and prod(layer.output) == prod(given[:2])
