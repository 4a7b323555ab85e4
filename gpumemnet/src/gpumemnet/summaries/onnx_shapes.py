"""The shapes of an ONNX graph's tensors, by onnx' own inference and from what an exporter wrote.

The inference follows integers (the shape for a Reshape) through a few operators only. If it fails, computations of
integers alone are done here, with onnx' own reference of each operator, and inference is repeated. Large weights are
removed before, because it would copy them.
"""

from __future__ import annotations

import importlib
from math import prod
from typing import Any

from carma.errors import Usage
from gpumemnet.summaries.onnx_nodes import FLOATS, Tensors
from gpumemnet.summaries.shapes import Shape

WHOLE = (
    "Export it with fixed shapes (torch.onnx.export without dynamic_shapes and dynamic_axes); or write them down with "
    "python -m onnxruntime.tools.symbolic_shape_infer; or use torchinfo."
)
_SMALL = 1024  # values; shapes for a Reshape are smaller, weights are larger
_NUMBERS = 1 << 16  # integers, of positions or distances
_ROUNDS = 64  # of computing and inference; each passes at least one operator
_COMPUTED = (
    "Constant", "Shape", "Size", "Concat", "Reshape", "Squeeze", "Unsqueeze", "Gather", "GatherElements", "Slice",
    "Cast", "CastLike", "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Min", "Max", "Floor", "Ceil", "Equal", "Greater",
    "Less", "GreaterOrEqual", "LessOrEqual", "Not", "And", "Or", "Where", "Range", "ConstantOfShape", "Expand",
    "Identity", "ReduceProd", "ReduceSum", "Split", "Transpose", "Flatten",
)  # fmt: skip


def infer(onnx: Any, model: Any, names: dict[str, int]) -> Tensors:
    """The shapes and types of all tensors; `names` are known sizes. The model is changed: large weights become inputs
    without values. Shapes that an exporter wrote are mostly for another batch, so they are used only if nothing can be
    inferred."""
    written = _take_off(onnx, model.graph, names)
    found = _inferred(onnx, model)
    numbers: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        if not any(shape is None and kind in FLOATS for shape, kind in found.values()):
            break
        if not _compute(onnx, model, found, numbers):
            break
        found = _inferred(onnx, model)
    missing = {name: types for name, types in written.items() if found.get(name, (None, 0))[0] is None}
    if not missing:
        return found
    types = (onnx.helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in missing.items())
    model.graph.value_info.extend(types)  # shapes that depend on them can be inferred
    return {**_inferred(onnx, model), **missing}


def _take_off(onnx: Any, graph: Any, names: dict[str, int]) -> Tensors:
    """Removes large weights and the exporter's shapes, and returns the usable ones of these."""
    weights = list(graph.initializer)
    taken = {value.name for value in graph.input}
    values = ((value, _shape(value, names)) for value in (*graph.value_info, *graph.output))
    written: Tensors = {
        value.name: (shape, value.type.tensor_type.elem_type) for value, shape in values if shape is not None
    }
    del graph.initializer[:], graph.value_info[:]
    for tensor in weights:
        if prod(tensor.dims) <= (_SMALL if tensor.data_type in FLOATS else _NUMBERS):
            graph.initializer.append(tensor)
        elif tensor.name not in taken:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    return written


def _inferred(onnx: Any, model: Any) -> Tensors:
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception as error:  # any exception of the C++ inference
        raise Usage(f"the shapes of the ONNX graph cannot be inferred: {str(error)[:200]}", WHOLE) from None
    values = (*inferred.value_info, *inferred.output, *inferred.input)
    return {
        value.name: (_shape(value, {}), value.type.tensor_type.elem_type)
        for value in values
        if value.type.tensor_type.elem_type
    }


def _shape(value: Any, names: dict[str, int]) -> Shape | None:
    """None if a size is neither a number nor one of the names."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    sizes = tuple(dim.dim_value or names.get(dim.dim_param, -1) for dim in tensor.shape.dim)
    return sizes if all(size > 0 for size in sizes) else None


def _compute(onnx: Any, model: Any, found: Tensors, numbers: dict[str, Any]) -> bool:
    """Adds what can be computed of integers to the graph, as weights; False if nothing is new."""
    graph, before = model.graph, len(numbers)
    for tensor in graph.initializer:
        if tensor.data_type not in FLOATS and tensor.name not in numbers and not tensor.external_data:
            numbers[tensor.name] = onnx.numpy_helper.to_array(tensor)
    kept, start = [], len(numbers)
    for node in graph.node:
        made = _computed(onnx, model, node, found, numbers) if node.op_type in _COMPUTED else None
        if made is None:
            kept.append(node)
        else:
            numbers.update(made)
            graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in made.items())
    del graph.node[:]
    graph.node.extend(kept)
    return len(numbers) > max(start, before)


def _computed(onnx: Any, model: Any, node: Any, found: Tensors, numbers: dict[str, Any]) -> dict[str, Any] | None:
    """Computed values by the name of their output; None if it needs more than integers."""
    taken = [name for name in node.input if name]
    if node.op_type == "Shape" and not node.attribute and (shape := found.get(taken[0], (None, 0))[0]) is not None:
        tensor = onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, (len(shape),), shape)
        return {node.output[0]: onnx.numpy_helper.to_array(tensor)}
    if any(name not in numbers for name in taken) or any(attribute.HasField("g") for attribute in node.attribute):
        return None
    numpy_of = onnx.numpy_helper
    given = [numpy_of.from_array(numbers[name], name) for name in dict.fromkeys(taken)]
    ends = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    whole = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [], ends, given), opset_imports=list(model.opset_import)
    )
    try:
        made = importlib.import_module("onnx.reference").ReferenceEvaluator(whole).run(None, {})
    except Exception:  # any exception of an operator's reference: it stays unknown
        return None
    if any(not hasattr(array, "dtype") or array.dtype.kind not in "iub" or array.size > _NUMBERS for array in made):
        return None
    return dict(zip((name for name in node.output if name), made, strict=True))
