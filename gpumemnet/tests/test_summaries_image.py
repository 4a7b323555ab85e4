"""The input of a table that has only its size in MB: one square image if exactly one size is possible, else unknown."""

from __future__ import annotations

import pytest

from carma.trial.layers.description import Layer
from gpumemnet.serving.estimator import with_input
from gpumemnet.summaries import read_text
from gpumemnet.summaries.totals import square_image

TABLE = """\
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
Net                                      [32, 10]                  --
├─Conv2d: 1-1                            [32, 64, 112, 112]        9,408
├─AdaptiveAvgPool2d: 1-2                 [32, 64, 1, 1]            --
├─Linear: 1-3                            [32, 10]                  650
==========================================================================================
Total params: 10,058
Trainable params: 10,058
Non-trainable params: 0
==========================================================================================
Input size (MB): {}
==========================================================================================
"""


def _stem(made: int, high: int, parameters: int, kind: str = "Conv2d") -> Layer:
    return Layer(kind=kind, output=(32, made, high, high), parameters=parameters)


def test_the_line_below_the_table_determines_the_input() -> None:
    read = read_text(TABLE.format("19.27"))
    assert read.described.input == (32, 3, 224, 224)
    assert with_input(read.described) == (read.described, ())  # nothing is guessed, and nothing said
    assert read_text(TABLE.format("19.27"), batch=8).described.input == (8, 3, 224, 224)


@pytest.mark.parametrize("text", [TABLE.format("19.27").replace("Input size", "No size"), TABLE.format("3.00")])
def test_without_an_image_size_the_input_is_assumed_with_a_remark(text: str) -> None:
    read = read_text(text)
    assert read.described.input == ()
    guessed, (said,) = with_input(read.described)
    assert guessed.input == (32, 3, 224, 224)
    assert "guessed from the first layer: --input sets it" in said


@pytest.mark.parametrize(
    ("first", "batch", "megabytes", "found"),
    [
        (_stem(64, 112, 9_408), 1, 0.60, (1, 3, 224, 224)),  # 223 is as many, and no stride divides it
        (_stem(64, 112, 9_408), 1, 0.57, (1, 3, 224, 224)),  # torchsummary's megabytes
        (_stem(32, 149, 864), 16, 17.16, (16, 3, 299, 299)),  # 3 x 3, stride 2, no padding: Inception
        (_stem(64, 55, 23_296), 32, 19.27, (32, 3, 224, 224)),  # 11 x 11, stride 4, with its bias: AlexNet
        (_stem(768, 14, 590_592), 64, 38.54, (64, 3, 224, 224)),  # patches of 16 x 16
        (_stem(32, 26, 320), 128, 0.40, (128, 1, 28, 28)),  # digits
        (_stem(64, 16, 12_608), 16, 0.26, ()),  # 4 x 7 x 7 or 1 x 14 x 14: more than one image has it
        (_stem(64, 112, 9_408), 1, 0.01, ()),  # too few digits
        (_stem(64, 112, 9_407), 32, 19.27, ()),  # no such weights
        (_stem(64, 112, 9_408), 32, None, ()),
        (_stem(64, 112, 9_408, "Linear"), 32, 19.27, ()),
        (Layer(kind="Conv2d", output=(32, 64, 112, 56), parameters=9_408), 32, 19.27, ()),  # not square
    ],
)
def test_one_square_image_or_none(first: Layer, batch: int, megabytes: float | None, found: tuple[int, ...]) -> None:
    assert square_image(first, batch, megabytes) == found
