"""Keras summaries of both versions, against what the layers are."""

from __future__ import annotations

import math

import pytest
from keras_texts import (
    EXPANDED_2,
    EXPANDED_3,
    FUNCTIONAL_2,
    FUNCTIONAL_3,
    NESTED_3,
    SEQUENTIAL_2,
    TEXT_3,
    UNBUILT_3,
)

from carma.errors import Usage
from carma.trial.layers.description import Described
from carma.trial.layers.kinds import KINDS
from gpumemnet.serving.features import PLACE, features
from gpumemnet.summaries import read_text
from gpumemnet.summaries.keras_summary import IN_TORCH

# Keras before 2.6: rules between the rows, and what is too long for its column is cut off.
OLD = """
_________________________________________________________________
Layer (type)                 Output Shape              Param #
=================================================================
conv2d_1 (Conv2D)            (None, 26, 26, 32)        320
_________________________________________________________________
max_pooling2d_1 (MaxPooling2 (None, 13, 13, 32)        0
_________________________________________________________________
batch_normalization_1 (Batch (None, 13, 13, 32)        128
_________________________________________________________________
flatten_1 (Flatten)          (None, 5408)              0
_________________________________________________________________
dense_1 (Dense)              (None, 10)                54090
=================================================================
Total params: 54,538
Trainable params: 54,474
Non-trainable params: 64
_________________________________________________________________
"""
TRAINED = """
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┓
┃ Layer (type)                    ┃ Output Shape           ┃       Param # ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━┩
│ dense (Dense)                   │ (None, 10)             │           110 │
└─────────────────────────────────┴────────────────────────┴───────────────┘
 Total params: 332 (1.30 KB)
 Trainable params: 110 (440.00 B)
 Non-trainable params: 0 (0.00 B)
 Optimizer params: 222 (892.00 B)
"""


def kinds(model: Described) -> list[str]:
    return [layer.kind for layer in model.layers]


@pytest.mark.parametrize("text", [FUNCTIONAL_3, FUNCTIONAL_2])
def test_branches_cut_names_and_two_outputs(text: str) -> None:
    model = read_text(text, batch=4).described
    assert kinds(model) == ["Conv2D", "Conv2D", "Add", "GlobalAveragePooling2D", "Dense", "Dense"]
    assert [layer.parameters for layer in model.layers] == [448, 64, 0, 0, 170, 85]
    assert [layer.output for layer in model.layers] == [(4, 16, 32, 32)] * 3 + [(4, 16), (4, 10), (4, 5)]
    assert [layer.inputs for layer in model.layers[:2]] == [((4, 3, 32, 32),)] * 2  # both take the image
    assert model.layers[0].attributes == {"in_channels": "3", "out_channels": "16", "kernel_size": "(3, 3)"}
    assert (model.batch, model.parameters, model.input) == (4, 767, (4, 3, 32, 32))


@pytest.mark.parametrize("text", [SEQUENTIAL_2, OLD])
def test_moving_averages_are_no_parameters(text: str) -> None:
    model = read_text(text).described
    norm = next(layer for layer in model.layers if layer.kind == "BatchNormalization")
    assert norm.parameters == 64
    assert model.parameters == 54_474
    assert "MaxPooling2D" in kinds(model)
    assert model.batch is None
    assert model.layers[0].output == (1, 32, 26, 26)


def test_a_printed_batch_and_another() -> None:
    fixed = SEQUENTIAL_2.replace("(None,", "(16,  ")  # columns stay where they are
    assert read_text(fixed).described.batch == 16
    assert read_text(fixed, batch=2).described.layers[0].output == (2, 32, 26, 26)


def test_the_optimizers_variables_are_not_the_models() -> None:
    model = read_text(TRAINED).described
    assert (model.parameters, model.optimizer_slots) == (110, 2)


@pytest.mark.parametrize("text", [EXPANDED_3, EXPANDED_2])
def test_nested_models_that_are_shown(text: str) -> None:
    model = read_text(text).described
    assert [layer.name for layer in model.layers] == ["dense_4", "dense_2", "dense_3", "dense_5"]
    assert model.parameters == sum(layer.parameters for layer in model.layers) == 1250


def test_nested_models_that_are_not_shown() -> None:
    read = read_text(NESTED_3)
    assert kinds(read.described) == ["Dense", "Sequential", "Dense"]
    assert any("of 1 nested model; summary(expand_nested=True)" in gap for gap in read.gaps)


def test_the_length_of_a_sequence_comes_from_the_input() -> None:
    model = read_text(TEXT_3, batch=4, sample=(20,)).described
    assert kinds(model) == ["Embedding", "MultiHeadAttention", "Add", "LayerNormalization", "LSTM"]
    assert [layer.output for layer in model.layers] == [(4, 20, 64)] * 4 + [(4, 32)]  # of the states the first
    assert model.input == (4, 20)


def test_without_it_no_output_is_known() -> None:
    read = read_text(TEXT_3)
    assert all(layer.output == () for layer in read.described.layers)
    assert read.described.parameters == 93_184
    assert any("--input" in gap for gap in read.gaps)
    assert read_text(TEXT_3, sample=(20,)).gaps == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (UNBUILT_3, "line 6 .* not built"),
        (FUNCTIONAL_3.replace("┃    Param # ┃", "┃"), "line 4 .* width of the terminal"),
        (FUNCTIONAL_3.replace("│        448 │", "│"), "line 9 .* width of the terminal"),
        (FUNCTIONAL_3.replace("│        448 │", "│       many │"), "line 9 .*'many' is not a number"),
        (FUNCTIONAL_3.replace("(None, 32, 32,", "(None, wide,  "), "line 6 .* not the shape"),
        (FUNCTIONAL_3.partition("└")[0], "line 4 .* cut off"),
        (SEQUENTIAL_2.rpartition(" flatten")[0], "line 4 .* cut off"),
        (SEQUENTIAL_2.replace("dense (Dense) ", "dense         "), "line 18 .* class in brackets"),
    ],
)
def test_what_cannot_be_read_has_its_line(text: str, told: str) -> None:
    with pytest.raises(Usage, match=told):
        read_text(text)


def test_an_input_with_known_shapes_is_a_remark() -> None:
    for same in ((3, 32, 32), (32, 32, 3)):  # as PyTorch has it, as Keras has it
        assert read_text(FUNCTIONAL_3, sample=same) == read_text(FUNCTIONAL_3)
    other = read_text(FUNCTIONAL_3, sample=(3, 64, 64))
    assert other.described == read_text(FUNCTIONAL_3).described
    assert any("an input of 3x32x32, which is used; --input 3x64x64" in remark for remark in other.remarks)
    untold = read_text(SEQUENTIAL_2, batch=4, sample=(1, 28, 28))
    assert (untold.described.input, untold.remarks) == ((4, 1, 28, 28), (IN_TORCH,))


@pytest.mark.parametrize("text", [SEQUENTIAL_2, FUNCTIONAL_3])
def test_a_remark_says_that_the_figure_is_pytorchs(text: str) -> None:
    (said,) = (remark for remark in read_text(text, batch=4).remarks if "PyTorch" in remark)
    assert "TensorFlow, by default, takes the whole card" in said


@pytest.mark.parametrize("text", [SEQUENTIAL_2, FUNCTIONAL_2, EXPANDED_2])
def test_blank_lines_that_were_lost(text: str) -> None:
    packed = "\n".join(line for line in text.splitlines() if line.strip(" |"))
    assert packed.count("\n") < text.count("\n")
    assert read_text(packed) == read_text(text)


def test_rows_that_were_deleted() -> None:
    rows = [line for line in SEQUENTIAL_2.splitlines() if "Normalization)" not in line]
    assert read_text("\n".join(line for line in rows if "(Batch" not in line)).remarks == (IN_TORCH,)  # 128 of 54,538
    with pytest.raises(Usage, match=r" 448 .* 54,538"):
        read_text("\n".join(line for line in SEQUENTIAL_2.splitlines() if "(Dense)" not in line))


def test_layers_that_are_not_trained() -> None:
    assert read_text(SEQUENTIAL_2).frozen == 0  # moving averages are no weights
    assert read_text(SEQUENTIAL_2.replace("Non-trainable params: 64", "Non-trainable params: 384")).frozen == 320


SIGNALS = """
_________________________________________________________________
Layer (type)                 Output Shape              Param #
=================================================================
conv1d (Conv1D)              (None, 126, 64)           640
_________________________________________________________________
re_lu (ReLU)                 (None, 126, 64)           0
_________________________________________________________________
max_pooling1d (MaxPooling1D) (None, 63, 64)            0
_________________________________________________________________
dense (Dense)                (None, 63, 10)            650
_________________________________________________________________
dropout (Dropout)            (None, 63, 10)            0
_________________________________________________________________
global_average_pooling1d (Gl (None, 10)                0
=================================================================
Total params: 1,290
"""


def test_signals_have_their_channels_first_and_a_convolution_is_one() -> None:
    model = read_text(SIGNALS, batch=8).described
    assert [(layer.kind, layer.output) for layer in model.layers] == [
        ("Conv1d", (8, 64, 126)),
        ("ReLU", (8, 64, 126)),
        ("MaxPooling1D", (8, 64, 63)),
        ("Dense", (8, 63, 10)),
        ("Dropout", (8, 63, 10)),
        ("GlobalAveragePooling1D", (8, 10)),
    ]
    assert model.layers[0].attributes == {"out_channels": "64"}
    assert model.layers[1].inputs == ((8, 64, 126),)
    found = features(model)
    assert found.family == "cnn"
    assert [KINDS[kind] for kind in found.kinds[:3]] == ["convolution", "rectifier", "max_pooling"]
    assert found.scalars[PLACE["width"]] == pytest.approx(math.log2(1 + 64))
