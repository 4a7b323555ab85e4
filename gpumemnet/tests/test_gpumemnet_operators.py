"""One network in every input format gives equal features: ONNX graph, table, print(model), row of the data set."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace

from carma.core.model.values import Estimate
from carma.trial.layers.description import Described, Layer, TrainingOptions
from carma.trial.layers.operators import layers_of
from carma.trial.protocol import NoTrials
from gpumemnet.dataset.layer_lists import LISTER
from gpumemnet.serving.estimator import GpuMemNet, with_input
from gpumemnet.serving.features import features
from gpumemnet.summaries import read_file, read_text
from gpumemnet.summaries.training_options import completed
from gpumemnet_fixtures.torch_programs import run_in_torch

BATCH = 64


def _unit(width: int, stride: int) -> dict[str, object]:
    body = [
        {"op": "conv", "out": width, "k": 3, "s": stride, "bias": False},
        {"op": "norm", "f": "batch"},
        {"op": "act", "f": "relu"},
        {"op": "conv", "out": width, "k": 3, "bias": False},
        {"op": "norm", "f": "batch"},
    ]
    aside = [{"op": "conv", "out": width, "k": 1, "s": stride, "bias": False}, {"op": "norm", "f": "batch"}]
    return {"op": "add", "bodies": [aside if stride > 1 else [], body]}


RESIDUAL = {
    "id": "r", "family": "cnn", "shape": "residual", "batch": BATCH, "input": [3, 112, 112], "outputs": 100,
    "optimizer": "adam", "precision": "fp32", "guess_mib": 1,
    "model": [
        {"op": "conv", "out": 64, "k": 7, "s": 2, "bias": False}, {"op": "norm", "f": "batch"},
        {"op": "act", "f": "relu"},
        *[step for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1))
          for step in (_unit(width, stride), {"op": "act", "f": "relu"})],
        {"op": "pool", "k": 0}, {"op": "flatten"}, {"op": "linear", "out": 100},
    ],
}  # fmt: skip

# Exports the graph that is trained, and prints the module.
WRITE = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch, build
config = json.load(open(sys.argv[2]))
model = build.build(config).train().to_empty(device="cpu")
print(str(model).replace("Chain()", "Identity()"))
torch.onnx.export(model, (torch.zeros(2, *config["input"]),), sys.argv[3], dynamo=False, do_constant_folding=False,
                  training=torch.onnx.TrainingMode.TRAINING)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Described]:
    """By who wrote it: the same network."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("written")
    config, graph = folder / "config.json", folder / "residual.onnx"
    config.write_text(json.dumps(RESIDUAL))
    inside = str(LISTER.parent)
    printed = run_in_torch(WRITE, inside, str(config), str(graph))
    listed = "import json,sys; sys.path.insert(0, sys.argv[1]); import layers; "
    listed += "print(json.dumps(layers.describe(json.load(open(sys.argv[2])))))"
    told = json.loads(run_in_torch(listed, inside, str(config)))
    own = Described(
        layers=tuple(
            Layer(**{**each, "output": tuple(each["output"]), "inputs": tuple(map(tuple, each.get("inputs", ())))})
            for each in told["layers"]
        ),
        batch=BATCH,
        parameters=told["parameters"],
        input=(BATCH, 3, 112, 112),
    )
    found = {
        "data": own,
        "onnx": read_file(graph, batch=BATCH).described,
        "torchinfo": read_text(_table(own), batch=BATCH).described,
        "print": read_text(printed, batch=BATCH, sample=(3, 112, 112)).described,
    }
    from carma.trial.layers.description import ReadSummary

    return {
        name: completed(ReadSummary(described=one), TrainingOptions(optimizer="adam")).described
        for name, one in found.items()
    }


def _table(own: Described) -> str:
    """As torchinfo prints it, without the modules that only hold others."""
    line = "=" * 90
    head = f"{'Layer (type:depth-idx)':<41}{'Output Shape':<26}Param #"
    rows = [
        f"├─{f'{layer.kind}: 1-{place}':<39}{list(layer.output)!s:<26}{layer.parameters or '--'}"
        for place, layer in enumerate(own.layers, 1)
    ]
    return "\n".join([line, head, line, f"{'Net':<41}{list(own.layers[-1].output)!s:<26}--", *rows, line])


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("name", ["onnx", "torchinfo", "print"])
def test_a_residual_network_from_every_source_has_the_same_estimate(
    written: dict[str, Described], name: str, kind: str
) -> None:
    served = GpuMemNet(kind, NoTrials(), 0.99)  # type: ignore[arg-type]
    own, other = served.of(written["data"]), served.of(written[name])
    assert isinstance(own, Estimate), own
    assert isinstance(other, Estimate), other
    assert own.footprint_mib > 1500
    assert other.footprint_mib == pytest.approx(own.footprint_mib, rel=0.03)
    assert other.upper_mib == pytest.approx(own.upper_mib, rel=0.06)


@pytest.mark.parametrize("name", ["onnx", "print"])
def test_a_list_from_every_source_has_the_same_totals(written: dict[str, Described], name: str) -> None:
    """Not only nearly: what is learned from one list must hold for the other."""
    own, other = features(written["data"]), features(written[name])
    np.testing.assert_allclose(other.scalars, own.scalars, rtol=1e-6)


def test_a_table_determines_the_inputs_of_a_shortcut_and_of_the_first_layer(written: dict[str, Described]) -> None:
    own, (table, _) = written["data"], with_input(written["torchinfo"])
    assert table.input == own.input
    np.testing.assert_allclose(features(table).scalars, features(own).scalars, rtol=1e-6)


def kinds(*layers: tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], int]) -> list[str]:
    made = tuple(Layer(kind=one[0], output=one[1], parameters=one[2] if len(one) > 2 else 0) for one in layers)
    return [layer.kind for layer in layers_of(Described(layers=made)).layers]


IMAGE, GATE = (2, 8, 4, 4), (2, 8, 1, 1)


def test_sums_joins_and_losses_are_no_layers() -> None:
    found = kinds(
        ("Conv2d", IMAGE, 72), ("Add", IMAGE), ("Concat", IMAGE), ("Flatten", (2, 128)), ("Linear", (2, 10), 1290),
        ("CrossEntropyLoss", ()),
    )  # fmt: skip
    assert found == ["Conv2d", "Flatten", "Linear"]
    assert kinds(("Add", (2, 8))) == ["Add"]  # something must be there


def test_functions_in_pieces_are_put_together() -> None:
    assert kinds(("Sigmoid", IMAGE), ("Mul", IMAGE)) == ["SiLU"]
    assert kinds(("Sigmoid", GATE), ("Mul", IMAGE)) == ["Sigmoid"]  # a gate
    assert kinds(("Softplus", IMAGE), ("Tanh", IMAGE), ("Mul", IMAGE)) == ["Mish"]
    assert kinds(("Div", IMAGE), ("Erf", IMAGE), ("Add", IMAGE), ("Mul", IMAGE), ("Mul", IMAGE)) == ["GELU"]
    assert kinds(("Tanh", IMAGE), ("Mul", IMAGE)) == ["Tanh"]


def test_the_tangent_of_gelu_is_not_next_to_its_product() -> None:
    """`0.5 * x * (1 + tanh(...))`: a sum is between them."""
    pieces = ("Pow", "Mul", "Add", "Mul", "Tanh", "Add", "Mul", "Mul")
    assert kinds(*((piece, IMAGE) for piece in pieces)) == ["GELU"]


def test_attention_is_a_function_and_norms_keep_their_weight() -> None:
    rows, scores = (2, 16, 64), (2, 4, 16, 16)
    linear = ("Linear", rows, 4160)
    found = kinds(
        linear, linear, linear, ("MatMul", scores), ("Add", scores, 256), ("Softmax", scores), ("MatMul", rows), linear,
        ("Pow", rows), ("ReduceMean", (2, 16, 1)), ("Sqrt", (2, 16, 1)), ("Div", rows), ("Mul", rows, 64), linear,
        ("Add", rows, 1024),  # positions
    )  # fmt: skip
    assert found == ["Linear"] * 4 + ["RMSNorm", "Linear", "Add"]
    assert kinds(linear, ("Softmax", rows)) == ["Linear", "Softmax"]  # an output


def test_the_dropout_of_attentions_scores_is_no_layer() -> None:
    """As torch writes a training graph down: rows that a mask leaves empty are put in order, then some are dropped."""
    rows, scores = (4, 7, 16), (4, 2, 7, 7)
    linear = ("Linear", rows, 272)
    inside = [("MatMul", scores), ("Softmax", scores), ("Where", scores), ("Dropout", scores)]
    assert kinds(linear, *inside, ("MatMul", rows), linear) == ["Linear", "Linear"]
    assert kinds(linear, *inside[:3], ("MatMul", rows), linear) == ["Linear", "Linear"]
    assert kinds(linear, *inside, linear) == ["Linear", "Softmax", "Dropout", "Linear"]  # for no product
    assert kinds(linear, ("Dropout", rows), ("MatMul", rows)) == ["Linear", "Dropout"]


def test_a_sum_with_weights_is_not_refused() -> None:
    served = GpuMemNet("mlp", NoTrials(), 0.99)
    layers = (
        Layer(kind="Linear", output=(4096, 1024), parameters=1024 * 1025),
        Layer(kind="Add", output=(4096, 1024), parameters=1024),
        Layer(kind="Linear", output=(4096, 1024), parameters=1024 * 1025),
    )
    network = Described(layers=layers, batch=4096, input=(4096, 1024), optimizer="Adam", optimizer_slots=2)
    assert isinstance(served.of(network), Estimate)
    strange = replace(network, layers=(layers[0], replace(layers[1], kind="Strange"), layers[2]))
    assert not isinstance(served.of(strange), Estimate)


def test_a_scale_for_each_channel_keeps_its_input_as_an_activation_does() -> None:
    layers = (
        Layer(kind="Linear", output=(2, 9, 8), parameters=72),
        Layer(kind="LayerScale", output=(2, 9, 8), parameters=8),
    )
    found = layers_of(Described(layers=layers, batch=2))
    assert [(layer.kind, layer.parameters) for layer in found.layers] == [("Linear", 72), ("Activation", 8)]
