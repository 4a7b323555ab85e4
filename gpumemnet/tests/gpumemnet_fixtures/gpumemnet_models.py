"""Models that are written by hand, not trained: small ONNX files with results that are easy to calculate, and networks.

MLP-based: `base + guess · factor` for each quantile, where the guess is the feature of that name. Transformer-based:
`base + factor · (MiB of the outputs of all layers + 100 MiB for each linear layer + 10 MiB for each that a rectifier
follows)`, equal layers counted by their weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer
from carma.trial.layers.kinds import INDEX, KINDS
from gpumemnet import Family
from gpumemnet.serving.features import FEATURES, PLACE, SETTINGS, TOKEN
from gpumemnet.serving.model import NEAR
from gpumemnet.serving.model_facts import Bound, Facts, Kind, LearnedFrom, encode_facts, stem

if TYPE_CHECKING:
    import onnx

BASE_MIB = 600.0
QUANTILES = (0.1, 0.5, 0.9)
FACTORS = (0.9, 1.0, 1.2)
LINEAR_MIB = 100.0
FOLLOWED_MIB = 10.0


def facts(family: Family = "mlp", kind: Kind = "mlp", **changed: object) -> Facts:
    """All kinds seen but attention, sizes up to 2^40, every setting but channels-last."""
    ranges = {name: (0.0, 40.0) for name in FEATURES if name not in SETTINGS}
    ranges |= dict.fromkeys(SETTINGS, (0.0, 1.0)) | {
        "slots": (0.0, 2.0),
        "temporaries": (0.0, 2.0),
        "channels_last": (0.0, 0.0),
    }
    ranges |= {"cos_function": (-1.0, 1.0), "sin_function": (-1.0, 1.0)}
    ranges["batch"] = (1.0, 14.0)  # 1 to 16,383
    made = Facts(
        name=stem(family, kind),
        family=family,
        kind=kind,
        quantiles=QUANTILES,
        operating_point=0.7,
        class_widths_gb=(1, 2) if family == "mlp" else (8, 1),
        base_mib=BASE_MIB,
        ranges=ranges,
        kinds_seen={name: 10 for name in KINDS if name != "attention"},
        most_layers=600,
        bounds={"0.9": Bound(quantile=0.9, factor=1.0), "0.99": Bound(quantile=0.9, factor=1.5)},
        learned=LearnedFrom(data_sha256={"mlp.parquet": "0" * 64}, rows=10, gpu="NVIDIA H200", torch="2.11.0+cu130"),
    )
    return replace(made, **changed)


def save(folder: Path, made: Facts) -> Path:
    """Both files; the one with the facts is given back."""
    import onnx
    from onnx import helper

    folder.mkdir(parents=True, exist_ok=True)
    graph = _guessing() if made.kind == "mlp" else _summing()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(folder / f"{made.name}.onnx"))
    file = folder / f"{made.name}.json"
    file.write_bytes(encode_facts(made))
    return file


def perceptron(batch: int = 8, width: int = 1024, depth: int = 1, **changed: object) -> Described:
    layers = [
        each
        for _ in range(depth)
        for each in (
            Layer(kind="Linear", output=(batch, width), parameters=width * (width + 1)),
            Layer(kind="ReLU", output=(batch, width)),
        )
    ]
    made = Described(layers=tuple(layers), batch=batch, input=(batch, width), optimizer="Adam", optimizer_slots=2)
    return replace(made, **changed)


def convolutions(batch: int = 4, kind: str = "Conv2d") -> Described:
    layers = (
        Layer(kind=kind, output=(batch, 64, 112, 112), parameters=9_408),
        Layer(kind="BatchNorm2d", output=(batch, 64, 112, 112), parameters=128),
        Layer(kind="Linear", output=(batch, 1000), parameters=65_000),
    )
    return Described(layers=layers, batch=batch, input=(batch, 3, 224, 224), optimizer="SGD", optimizer_slots=0)


def _constant(name: str, value: object, kind: type[np.generic]) -> onnx.TensorProto:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array(value, kind), name)


def _inputs() -> list[onnx.ValueInfoProto]:
    from onnx import TensorProto, helper

    return [helper.make_tensor_value_info("scalars", TensorProto.FLOAT, ["n", len(FEATURES)])]


def _output() -> list[onnx.ValueInfoProto]:
    from onnx import TensorProto, helper

    return [helper.make_tensor_value_info("quantiles", TensorProto.FLOAT, ["n", len(QUANTILES)])]


def _guessing() -> onnx.GraphProto:
    from onnx import helper

    nodes = [
        helper.make_node("Gather", ["scalars", "place"], ["log"], axis=1),
        helper.make_node("Pow", ["two", "log"], ["more"]),
        helper.make_node("Sub", ["more", "one"], ["guess"]),
        helper.make_node("Mul", ["guess", "factors"], ["scaled"]),
        helper.make_node("Add", ["scaled", "base"], ["quantiles"]),
    ]
    constants = [
        _constant("place", [PLACE["guess_mib"]], np.int64),
        _constant("two", 2.0, np.float32),
        _constant("one", 1.0, np.float32),
        _constant("factors", FACTORS, np.float32),
        _constant("base", BASE_MIB, np.float32),
    ]
    return helper.make_graph(nodes, "guessing", _inputs(), _output(), constants)


def _summing() -> onnx.GraphProto:
    """The scalars take no part but in the shape, so that all inputs are used."""
    from onnx import TensorProto, helper

    inputs = [
        *_inputs(),
        helper.make_tensor_value_info("kinds", TensorProto.INT64, ["n", "l", NEAR]),
        helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["n", "l", NEAR, len(TOKEN)]),
        helper.make_tensor_value_info("weights", TensorProto.FLOAT, ["n", "l"]),
    ]
    nodes = [
        helper.make_node("Gather", ["tokens", "itself"], ["own"], axis=2),
        helper.make_node("Gather", ["own", "place"], ["log"], axis=2),
        helper.make_node("Pow", ["two", "log"], ["outputs"]),
        *_counted("itself", "linear", "linear_mib"),
        *_counted("behind", "rectifier", "followed_mib"),
        helper.make_node("Sum", ["outputs", "linear_sum", "rectifier_sum"], ["of_layer"]),
        helper.make_node("Mul", ["of_layer", "weights"], ["counted"]),
        helper.make_node("ReduceSum", ["counted", "axis"], ["total"], keepdims=1),
        helper.make_node("ReduceMean", ["scalars", "axis"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["total", "nothing"], ["sum"]),
        helper.make_node("Mul", ["sum", "factors"], ["scaled"]),
        helper.make_node("Add", ["scaled", "base"], ["quantiles"]),
    ]
    constants = [
        _constant("itself", 1, np.int64),
        _constant("behind", 2, np.int64),
        _constant("place", TOKEN.index("output_mib"), np.int64),
        _constant("two", 2.0, np.float32),
        _constant("linear", INDEX["linear"], np.int64),
        _constant("rectifier", INDEX["rectifier"], np.int64),
        _constant("linear_mib", LINEAR_MIB, np.float32),
        _constant("followed_mib", FOLLOWED_MIB, np.float32),
        _constant("axis", [1], np.int64),
        _constant("zero", 0.0, np.float32),
        _constant("factors", FACTORS, np.float32),
        _constant("base", BASE_MIB, np.float32),
    ]
    return helper.make_graph(nodes, "summing", inputs, _output(), constants)


def _counted(where: str, kind: str, mib: str) -> list[onnx.NodeProto]:
    """A model with this number of MiB for each layer that has this kind at that place of its three."""
    from onnx import TensorProto, helper

    return [
        helper.make_node("Gather", ["kinds", where], [f"{kind}_there"], axis=2),
        helper.make_node("Equal", [f"{kind}_there", kind], [f"is_{kind}"]),
        helper.make_node("Cast", [f"is_{kind}"], [f"{kind}_ones"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{kind}_ones", mib], [f"{kind}_sum"]),
    ]
