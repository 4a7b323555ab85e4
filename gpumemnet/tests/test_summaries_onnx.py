"""ONNX files, made here node by node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from carma.errors import Usage
from gpumemnet.summaries import read_file

onnx = pytest.importorskip("onnx")
FLOAT, INTEGER = 1, 7


def weight(name: str, *shape: int) -> Any:
    count = 1
    for size in shape:
        count *= size
    return onnx.helper.make_tensor(name, FLOAT, shape, bytes(4 * count), raw=True)


def value(name: str, *shape: int | str, kind: int = FLOAT) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def written(file: Path, nodes: list[Any], inputs: list[Any], weights: list[Any]) -> Path:
    graph = onnx.helper.make_graph(nodes, "g", inputs, [onnx.helper.make_empty_tensor_value_info("out")], weights)
    graph.value_info.append(value("relu", 77, 8, 16, 16))  # what an exporter wrote down does not bind another batch
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    file.write_bytes(model.SerializeToString())
    return file


def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def images(file: Path, batch: int | str = "batch", norm: bool = True) -> Path:
    last = "normed" if norm else "conv"
    nodes = [
        node("Conv", "x w b", "conv", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        *([node("BatchNormalization", "conv scale shift mean var", "normed")] if norm else []),
        node("Relu", last, "relu"),
        node("Conv", "relu depth", "grouped", kernel_shape=[3, 3], group=8, pads=[1, 1, 1, 1]),
        node("Add", "grouped relu", "sum"),
        node("GlobalAveragePool", "sum", "pool"),
        node("Flatten", "pool", "flat"),
        node("Gemm", "flat head bias", "out", transB=1),
    ]
    norms = [weight(name, 8) for name in ("scale", "shift", "mean", "var")] if norm else []
    weights = [weight("w", 8, 3, 3, 3), weight("b", 8), *norms, weight("depth", 8, 1, 3, 3)]
    return written(file, nodes, [value("x", batch, 3, 32, 32)], [*weights, weight("head", 10, 8), weight("bias", 10)])


def words(file: Path, length: int | str) -> Path:
    """The head shares the words' weight, as language models have it; the middle has its bias in a node of its own."""
    nodes = [
        node("Gather", "table ids", "found"),
        node("MatMul", "found middle", "product"),
        node("Add", "product bias", "biased"),
        node("Shape", "biased", "sizes"),
        node("Transpose", "table", "turned", perm=[1, 0]),
        node("MatMul", "biased turned", "out"),
    ]
    weights = [weight("table", 100, 16), weight("middle", 16, 16), weight("bias", 16)]
    return written(file, nodes, [value("ids", "batch", length, kind=INTEGER)], weights)


def test_layers_by_pytorchs_names(tmp_path: Path) -> None:
    read = read_file(images(tmp_path / "net.onnx"), batch=4)
    model = read.described
    assert [(layer.kind, layer.output, layer.parameters) for layer in model.layers] == [
        ("Conv2d", (4, 8, 16, 16), 8 * 27 + 8),
        ("BatchNorm2d", (4, 8, 16, 16), 16),  # averages are no parameters
        ("ReLU", (4, 8, 16, 16), 0),
        ("Conv2d", (4, 8, 16, 16), 72),
        ("Add", (4, 8, 16, 16), 0),
        ("AdaptiveAvgPool2d", (4, 8, 1, 1), 0),
        ("Linear", (4, 10), 90),
    ]
    assert (model.batch, model.input, model.parameters) == (4, (4, 3, 32, 32), 224 + 16 + 72 + 90)
    assert model.layers[3].attributes == {
        "in_channels": "8", "out_channels": "8", "kernel_size": "(3, 3)", "groups": "8",
    }  # fmt: skip
    assert model.layers[6].attributes == {"in_features": "8", "out_features": "10"}
    assert model.layers[0].inputs == ((4, 3, 32, 32),)
    assert read.remarks == ()


def test_a_batch_that_was_fixed_is_scaled(tmp_path: Path) -> None:
    file = images(tmp_path / "net.onnx", batch=1)
    assert read_file(file).described.batch == 1
    model = read_file(file, batch=32).described
    assert {layer.output[0] for layer in model.layers} == {32}
    assert (model.batch, model.input) == (32, (32, 3, 32, 32))


def test_a_named_batch_size_is_unknown(tmp_path: Path) -> None:
    model = read_file(images(tmp_path / "net.onnx")).described
    assert model.batch is None
    assert model.layers[0].output == (1, 8, 16, 16)


def test_words_shared_weights_and_a_bias_of_its_own(tmp_path: Path) -> None:
    model = read_file(words(tmp_path / "net.onnx", "length"), batch=2, sample=(7,)).described
    assert [(layer.kind, layer.output, layer.parameters) for layer in model.layers] == [
        ("Embedding", (2, 7, 16), 1600),
        ("Linear", (2, 7, 16), 16 * 16 + 16),
        ("Linear", (2, 7, 100), 0),
    ]
    assert model.parameters == 1600 + 272


@pytest.mark.parametrize(
    ("length", "sample", "told"),
    [
        ("length", (), "size 'length' of the input 'ids' is unknown"),
        ("length", (7, 7), "has 1 sizes besides the batch"),
        (9, (7,), "exported with 9"),
    ],
)
def test_unknown_or_impossible_sizes_are_errors(
    tmp_path: Path, length: int | str, sample: tuple[int, ...], told: str
) -> None:
    with pytest.raises(Usage, match=told) as caught:
        read_file(words(tmp_path / "net.onnx", length), batch=2, sample=sample)
    assert caught.value.hint


def test_weights_in_another_file_are_not_needed(tmp_path: Path) -> None:
    file = images(tmp_path / "net.onnx")
    model = onnx.load(file)
    onnx.save(model, tmp_path / "other.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert read_file(tmp_path / "other.onnx", batch=4) == read_file(file, batch=4)


@pytest.mark.parametrize("content", [b"", b"hello, this is text", b"\x08\x07\x12\xff\xff", b"\0" * 100])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(Usage, match="ONNX"):
        read_file(tmp_path / "net.onnx")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9, 0.99])
def test_a_file_that_is_cut_off(tmp_path: Path, part: float) -> None:
    whole = images(tmp_path / "net.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(Usage, match="ONNX"):
        read_file(tmp_path / "cut.onnx")


def test_known_by_its_content(tmp_path: Path) -> None:
    file = images(tmp_path / "net.onnx")
    assert read_file(file.rename(tmp_path / "model"), batch=4).described.batch == 4


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = images(tmp_path / "net.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(Usage, match="needs the package onnx") as caught:
        read_file(file)
    assert caught.value.hint == "pip install onnx"
