"""Reads models from ONNX files: shapes by onnx' own inference, weights by their shapes only (no values are read).

The batch is the first size of the first input. If it has a name, it becomes the batch asked for; if it is a number, as
in most exports, the shapes are scaled. Other named sizes (the length of a sequence) come from --input.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from carma.errors import Usage
from carma.trial.layers.description import Described, ReadSummary
from gpumemnet.summaries.onnx_nodes import Graph
from gpumemnet.summaries.onnx_shapes import WHOLE, infer
from gpumemnet.summaries.shapes import Shape, show
from gpumemnet.summaries.text import counted

_MOST_BYTES = 2 << 30  # of a protocol buffer; weights of larger models are in other files
_SECOND = (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72)  # names, versions, the graph, what it imports
_HINT = "It takes what torch.onnx.export or another exporter wrote, whole."
_AGAIN = "torch.onnx.export(model.train(), ..., optimize=False)"
_FOLDED = (
    "its convolutions have no batch norms behind them, as after an export for inference: training would take more, so "
    f"no bound is given. {_AGAIN} keeps them; of a model without, torchinfo tells more"
)
_DRY = (
    "it has no dropout, as after an export for inference: training would take more, so no bound is given. "
    f"{_AGAIN} keeps it; of a model without, torchinfo tells more"
)


def is_onnx(start: bytes) -> bool:
    """How the protocol buffer of a model begins: the version of the format, a small number, then another field."""
    return len(start) > 2 and start[0] == 0x08 and 0 < start[1] < 0x40 and start[2] in _SECOND


def read_onnx(file: Path, batch: int | None, sample: Shape) -> ReadSummary:
    """Raises Usage for other files, and if onnx is not installed."""
    if file.stat().st_size > _MOST_BYTES:
        raise _too_large()
    return read_onnx_bytes(file.read_bytes(), batch, sample)


def read_onnx_bytes(raw: bytes, batch: int | None, sample: Shape) -> ReadSummary:
    """The content of such a file or of a pipe."""
    onnx = _library()
    model = _load(onnx, raw)
    weights = {tensor.name: (tuple(tensor.dims), tensor.data_type) for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if not inputs:
        raise Usage("the ONNX graph has no input", _HINT)
    fixed = _fixed_batch(inputs[0])
    given, names = _set_sizes(inputs, batch or 1, sample)
    graph = Graph(model.graph.node, weights, infer(onnx, model, names))
    layers = graph.layers(fixed, batch)
    _check_known(graph)
    if not layers:
        raise Usage("the ONNX graph has no operator that makes real numbers", _HINT)
    described = Described(
        layers=layers,
        batch=batch or fixed,
        parameters=graph.parameters,
        input=(batch or fixed or 1, *given[1:]),
    )
    remarks = () if graph.is_for_training else (_FOLDED if graph.is_folded else _DRY,)
    return ReadSummary(described=described, remarks=remarks, is_partial=not graph.is_for_training)


def _check_known(graph: Graph) -> None:
    """Refuses unknown parts, which would otherwise count as nothing."""
    if graph.nested:
        raise Usage(
            f"{graph.nested} of the ONNX graph holds a graph of its own, whose layers cannot be counted",
            "Export it without branches and loops that hang on data, or use torchinfo or print(model).",
        )
    if graph.unknown:
        others = len(graph.unknown) - 1
        more = f", nor that of {counted(others, 'other output')}" if others else ""
        raise Usage(f"the shape of what {graph.unknown[0]} of the ONNX graph makes cannot be inferred{more}", WHOLE)


def _library() -> Any:
    try:
        onnx = importlib.import_module("onnx")
        importlib.import_module("onnx.shape_inference")
    except ImportError:
        raise Usage("reading an ONNX file needs the package onnx", "pip install onnx") from None
    return onnx


def _too_large() -> Usage:
    return Usage("the ONNX file is larger than 2 GiB", "Export it with its weights beside it (external data).")


def _load(onnx: Any, raw: bytes) -> Any:
    """Loads the graph without weights in other files."""
    if len(raw) > _MOST_BYTES:
        raise _too_large()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except Exception as error:  # protobuf's DecodeError, without importing protobuf
        raise Usage(f"the file is no ONNX model, or is cut off ({type(error).__name__})", _HINT) from None
    if not model.graph.node:
        raise Usage("the file holds no ONNX graph", _HINT)
    return _inlined(model) if model.functions else model


def _inlined(model: Any) -> Any:
    """Replaces operators that the model defines itself by those of ONNX."""
    try:
        return importlib.import_module("onnx.inliner").inline_local_functions(model)
    except Exception as error:  # any exception of the C++ checker
        raise Usage(f"the functions of the ONNX model cannot be followed: {error}", _HINT) from None


def _fixed_batch(value: Any) -> int | None:
    dims = value.type.tensor_type.shape.dim
    return dims[0].dim_value if dims and dims[0].dim_value > 0 else None


def _set_sizes(inputs: list[Any], batch: int, sample: Shape) -> tuple[Shape, dict[str, int]]:
    """Replaces named sizes by numbers, the same for one name in all inputs. Returns the first input's shape, and the
    numbers by name."""
    first = inputs[0].type.tensor_type.shape.dim
    asked = (batch, *sample) if sample else (batch, *(0 for _ in first[1:]))
    if len(asked) != len(first):
        raise _misfit(sample, inputs[0], f"has {len(first) - 1} sizes besides the batch")
    names: dict[str, int] = {}
    for place, (dim, size) in enumerate(zip(first, asked, strict=True)):
        if place and size and dim.dim_value not in (0, size):
            raise _misfit(sample, inputs[0], f"was exported with {dim.dim_value} in place {place}")
        if not dim.dim_value and size:
            names.setdefault(dim.dim_param or f"?{place}", size)
    for value in inputs:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.dim_value:
                size = names.get(dim.dim_param or f"?{place}", batch if place == 0 else 0)
                if not size:
                    raise _unknown_size(value, dim, place)
                names.setdefault(dim.dim_param or f"?{place}", size)
                dim.dim_value = size
    return tuple(dim.dim_value for dim in first), names


def _misfit(sample: Shape, value: Any, why: str) -> Usage:
    return Usage(f"--input {show(sample)} does not fit: the input {value.name!r} {why}", _HINT)


def _unknown_size(value: Any, dim: Any, place: int) -> Usage:
    name = f"size {dim.dim_param!r}" if dim.dim_param else f"size {place}"
    return Usage(
        f"the {name} of the input {value.name!r} is unknown",
        "Give the shape of one sample: --input 128, --input 3x224x224.",
    )
