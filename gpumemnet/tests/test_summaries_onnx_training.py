"""What an ONNX file lacks: shapes that cannot be inferred, and what an export for inference left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_summaries_onnx import INTEGER, images, node, onnx, value, weight, words, written

from carma.errors import Usage
from gpumemnet.summaries import read_bytes, read_file

ODD = "the node 'odd' (Odd) of the ONNX graph makes cannot be inferred"


def odd(file: Path, *values: Any) -> Path:
    """An operator that ONNX does not have, between two that it has."""
    nodes = [
        node("Gemm", "x w", "first"),
        node("Odd", "first", "odd", domain="of.mine"),
        node("Relu", "odd", "relued"),
        node("Gemm", "relued w", "out"),
    ]
    model = onnx.load(written(file, nodes, [value("x", "batch", 16)], [weight("w", 16, 16)]))
    model.graph.value_info.extend(values)
    model.opset_import.append(onnx.helper.make_opsetid("of.mine", 1))
    file.write_bytes(model.SerializeToString())
    return file


def test_what_cannot_be_inferred_is_named(tmp_path: Path) -> None:
    """It once counted as nothing, which may be all of it."""
    with pytest.raises(Usage) as caught:
        read_file(odd(tmp_path / "net.onnx"), batch=4)
    assert str(caught.value).startswith(f"the shape of what {ODD}, nor that of 2 other outputs")
    assert "fixed shapes" in caught.value.hint


@pytest.mark.parametrize("batch", ["batch", 4])
def test_shapes_that_an_exporter_wrote_are_used_if_none_can_be_inferred(tmp_path: Path, batch: str | int) -> None:
    model = read_file(odd(tmp_path / "net.onnx", value("odd", batch, 16)), batch=4).described
    assert [(layer.kind, layer.output) for layer in model.layers] == [
        ("Linear", (4, 16)), ("Odd", (4, 16)), ("ReLU", (4, 16)), ("Linear", (4, 16)),
    ]  # fmt: skip


def test_an_unknown_name_is_no_shape(tmp_path: Path) -> None:
    told = [value("odd", "batch", "else"), value("relued", "batch", 16)]
    with pytest.raises(Usage) as caught:
        read_file(odd(tmp_path / "net.onnx", *told), batch=4)
    assert str(caught.value) == f"the shape of what {ODD}"  # of it alone


def test_shapes_that_are_computed_from_shapes(tmp_path: Path) -> None:
    """The inference does not follow numbers through a Reshape, as exporters have it."""
    integer = onnx.helper.make_tensor
    nodes = [
        node("Shape", "x", "sizes"),
        node("Gather", "sizes zero", "batch"),
        node("Reshape", "batch one", "rows"),
        node("Reshape", "eight one", "wide"),
        node("Concat", "rows wide two", "wanted", axis=0),
        node("Reshape", "x wanted", "seen"),
        node("Relu", "seen", "out"),
    ]
    numbers = [
        integer("zero", INTEGER, (), [0]),
        *(integer(name, INTEGER, (1,), [size]) for name, size in (("one", -1), ("two", 2), ("eight", 8))),
    ]
    file = written(tmp_path / "net.onnx", nodes, [value("x", "batch", 16)], numbers)
    (layer,) = read_file(file, batch=4).described.layers
    assert layer.output == (4, 8, 2)


def test_a_loop_has_layers_of_its_own(tmp_path: Path) -> None:
    ends = [value("kept", kind=9), value("inner", "batch", 16)]
    body = onnx.helper.make_graph(
        [node("Identity", "go", "kept"), node("MatMul", "state w", "inner")],
        "body",
        [value("turn", kind=INTEGER), value("go", kind=9), value("state", "batch", 16)],
        ends,
    )
    nodes = [node("Gemm", "x w", "first"), node("Loop", "turns go first", "out", body=body)]
    inputs = [value("x", "batch", 16), value("turns", kind=INTEGER), value("go", kind=9)]
    with pytest.raises(Usage, match=r"'out' \(Loop\)"):
        read_file(written(tmp_path / "net.onnx", nodes, inputs, [weight("w", 16, 16)]), batch=4)


def convolved(file: Path, bias: str, *behind: Any) -> Path:
    nodes = [node("Conv", f"x conv.weight {bias}".strip(), "made", kernel_shape=[3, 3]), *behind]
    weights = [weight("conv.weight", 8, 3, 3, 3), *(weight(name, 8) for name in ("conv.bias", "onnx_1", "scale"))]
    return written(file, nodes, [value("x", "batch", 3, 32, 32)], weights)


@pytest.mark.parametrize(
    ("bias", "is_partial"),
    [
        ("", True),  # a bias is only left out where a norm follows
        ("onnx_1", True),  # an exporter's own name: it was computed
        ("conv.bias", False),
    ],
)
def test_convolutions_that_batch_norms_were_folded_into(tmp_path: Path, bias: str, is_partial: bool) -> None:
    behind = (node("Relu", "made", "relued"), node("Dropout", "relued", "out"))
    read = read_file(convolved(tmp_path / "net.onnx", bias, *behind), batch=4)
    assert read.is_partial == is_partial
    assert any("no batch norms behind them" in remark for remark in read.remarks) == is_partial


def test_a_convolution_with_its_norm(tmp_path: Path) -> None:
    norm = node("BatchNormalization", "made scale scale scale scale", "normed")
    behind = (norm, node("Relu", "normed", "out"))
    assert not read_file(convolved(tmp_path / "net.onnx", "", *behind), batch=4).is_partial


def test_a_graph_without_dropout_has_no_bound_either(tmp_path: Path) -> None:
    read = read_file(words(tmp_path / "net.onnx", "length"), batch=2, sample=(7,))
    assert read.is_partial
    (remark,) = read.remarks
    assert "no dropout" in remark
    assert "model.train()" in remark


def test_out_of_a_pipe(tmp_path: Path) -> None:
    file = images(tmp_path / "net.onnx")
    assert read_bytes(file.read_bytes(), batch=4) == read_file(file, batch=4)
    with pytest.raises(Usage, match="a batch of 0"):
        read_bytes(file.read_bytes(), batch=0)
