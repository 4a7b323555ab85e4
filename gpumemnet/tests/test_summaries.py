"""Models from text. The texts are what the tools printed of one small network, and the counts are torch's own."""

from __future__ import annotations

from math import prod

import pytest

from carma.errors import Usage
from gpumemnet.summaries import read_text

FLAT = """
----------------------------------------------------------------
        Layer (type)               Output Shape         Param #
================================================================
            Conv2d-1           [-1, 16, 16, 16]           2,368
         MaxPool2d-2             [-1, 16, 8, 8]               0
            Conv2d-3             [-1, 16, 8, 8]           2,304
       BatchNorm2d-4             [-1, 16, 8, 8]              32
              ReLU-5             [-1, 16, 8, 8]               0
             Block-6             [-1, 16, 8, 8]               0
AdaptiveAvgPool2d-7             [-1, 16, 1, 1]               0
           Linear-8                   [-1, 10]             170
================================================================
Total params: 4,874
Trainable params: 4,874
Non-trainable params: 0
----------------------------------------------------------------
Input size (MB): 0.01
----------------------------------------------------------------
"""

NESTED = """
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
Net                                      [8, 10]                   --
├─Conv2d: 1-1                            [8, 16, 16, 16]           (2,368)
├─MaxPool2d: 1-2                         [8, 16, 8, 8]             --
├─Sequential: 1-3                        [8, 16, 8, 8]             --
│    └─Block: 2-1                        [8, 16, 8, 8]             16
│    │    └─Conv2d: 3-1                  [8, 16, 8, 8]             2,304
│    │    └─ReLU: 3-3                    [8, 16, 8, 8]             --
│    └─Block: 2-2                        [8, 16, 8, 8]             (recursive)
│    │    └─Conv2d: 3-4                  [8, 16, 8, 8]             (recursive)
│    │    └─ReLU: 3-6                    [8, 16, 8, 8]             --
├─Linear: 1-6                            [8, 10]                   170
==========================================================================================
Total params: 4,858
Trainable params: 2,490
==========================================================================================
"""

COLUMNS = """\
======================================================================================================================
Layer (type (var_name))      Input Shape        Output Shape       Param #            Param %            Kernel Shape
======================================================================================================================
Net (Net)                    [8, 3, 32, 32]     [8, 10]            --                      --            --
├─Conv2d (stem)              [8, 3, 32, 32]     [8, 16, 16, 16]    2,368               93.30%            [7, 7]
├─Sequential (blocks)        [8, 16, 8, 8]      [8, 16, 8, 8]      --                      --            --
│    └─Block (0)             [8, 16, 8, 8]      [8, 16, 8, 8]      16                   0.22%            --
│    │    └─ReLU (act)       [8, 16, 8, 8]      [8, 16, 8, 8]      --                      --            --
├─Linear (head)              [8, 16]            [8, 10]            170                  6.70%            --
======================================================================================================================
Total params: 2,554
======================================================================================================================
"""

PRINTED = """\
Net(
  (stem): Conv2d(3, 16, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3))
  (blocks): Sequential(
    (0-1): 2 x Block(
      (conv): Conv2d(16, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
      (norm): BatchNorm2d(16, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
      (act): ReLU(inplace=True)
    )
  )
  (attention): MultiheadAttention(
    (out_proj): NonDynamicallyQuantizableLinear(in_features=16, out_features=16, bias=True)
  )
  (gap): AdaptiveAvgPool2d(output_size=1)
  (head): Linear(in_features=16, out_features=10, bias=True)
)
"""

# Each as torch 2.13 prints it, with the sum of numel() over its parameters.
MODULES = {
    "Conv1d(4, 8, kernel_size=(3,), stride=(1,), bias=False)": 96,
    "Conv2d(8, 16, kernel_size=(3, 5), stride=(1, 1), groups=4)": 496,
    "Conv3d(2, 4, kernel_size=(3, 3, 3), stride=(1, 1, 1))": 220,
    "ConvTranspose2d(16, 8, kernel_size=(4, 4), stride=(1, 1), groups=2, bias=False)": 1024,
    "ConvTranspose1d(4, 6, kernel_size=(3,), stride=(1,))": 78,
    "Linear(in_features=10, out_features=20, bias=True)": 220,
    "Linear(in_features=10, out_features=20, bias=False)": 200,
    "NonDynamicallyQuantizableLinear(in_features=16, out_features=16, bias=True)": 272,
    "Bilinear(in1_features=3, in2_features=4, out_features=5, bias=True)": 65,
    "BatchNorm2d(16, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)": 32,
    "BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=False, bias=False, track_running_stats=True)": 0,
    "InstanceNorm2d(8, eps=1e-05, momentum=0.1, affine=False, bias=False, track_running_stats=False)": 0,
    "InstanceNorm2d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=False)": 16,
    "SyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)": 16,
    "LayerNorm((4, 8), eps=1e-05, elementwise_affine=True, bias=True)": 64,
    "LayerNorm((768,), eps=1e-05, elementwise_affine=True)": 1536,
    "LayerNorm((16,), eps=1e-05, elementwise_affine=False, bias=False)": 0,
    "LayerNorm((16,), eps=1e-05, elementwise_affine=True, bias=False)": 16,
    "GroupNorm(4, 16, eps=1e-05, affine=True, bias=True)": 32,
    "GroupNorm(4, 16, eps=1e-05, affine=False, bias=False)": 0,
    "RMSNorm((32,), eps=None, elementwise_affine=True)": 32,
    "LlamaRMSNorm((256,), eps=1e-06)": 256,
    "Embedding(100, 16, padding_idx=0)": 1600,
    "EmbeddingBag(100, 16, mode='sum')": 1600,
    "LSTM(10, 20, num_layers=2, batch_first=True)": 5920,
    "LSTM(10, 20, bias=False, bidirectional=True)": 4800,
    "LSTM(10, 20, proj_size=5)": 1460,
    "GRU(10, 20, num_layers=3, bidirectional=True)": 18720,
    "RNN(10, 20)": 640,
    "LSTMCell(10, 20)": 2560,
    "GRUCell(10, 20, bias=False)": 1800,
    "RNNCell(10, 20)": 640,
    "PReLU(num_parameters=8)": 8,
    "Conv1D(nf=2304, nx=768)": 1771776,
    "Dropout(p=0.1, inplace=False)": 0,
    "GELU(approximate='none')": 0,
    "NewGELUActivation()": 0,
    "LeakyReLU(negative_slope=0.01)": 0,
    "AdaptiveAvgPool2d(output_size=(1, 1))": 0,
    "LlamaRotaryEmbedding()": 0,
}


def test_a_torchsummary_table_without_its_blocks() -> None:
    model = read_text(FLAT, batch=4).described
    kinds = ["Conv2d", "MaxPool2d", "Conv2d", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Linear"]
    assert [layer.kind for layer in model.layers] == kinds
    assert [layer.parameters for layer in model.layers] == [2368, 0, 2304, 32, 0, 0, 170]
    assert model.layers[0].output == (4, 16, 16, 16)
    assert (model.batch, model.parameters) == (4, 4874)


def test_a_table_without_a_batch_has_none() -> None:
    model = read_text(FLAT).described
    assert model.batch is None
    assert sum(prod(layer.output) for layer in model.layers) == 4096 + 4 * 1024 + 16 + 10


def test_the_wanted_batch_replaces_the_printed_one() -> None:
    printed = FLAT.replace("[-1,", "[64,")
    assert read_text(printed).described.batch == 64
    other = read_text(printed, batch=32).described
    assert {layer.output[0] for layer in other.layers} == {32}
    assert [layer.output[1:] for layer in other.layers] == [
        layer.output[1:] for layer in read_text(printed).described.layers
    ]


def test_what_is_not_made_for_each_sample_stays() -> None:
    places = NESTED.replace("[8, 16, 8, 8]             --\n├─Seq", "[1, 16, 8, 8]             --\n├─Seq")
    assert [layer.output[0] for layer in read_text(places, batch=2).described.layers if layer.output] == [
        2,
        1,
        2,
        2,
        2,
        2,
        2,
    ]


def test_a_torchinfo_table_shared_and_frozen_layers_and_what_a_block_owns() -> None:
    model = read_text(NESTED).described
    kinds = ["Conv2d", "MaxPool2d", "Block", "Conv2d", "ReLU", "Conv2d", "ReLU", "Linear"]
    assert [layer.kind for layer in model.layers] == kinds
    assert [layer.parameters for layer in model.layers] == [2368, 0, 16, 2304, 0, 0, 0, 170]
    assert model.layers[2].output == ()  # its last layer made its output
    assert model.layers[5].output == (8, 16, 8, 8)  # called a second time: no new parameters, a new output
    assert (model.batch, model.parameters) == (8, 4858)


def test_a_torchinfo_table_with_other_columns_and_names() -> None:
    model = read_text(COLUMNS, batch=2).described
    assert [layer.name for layer in model.layers] == ["stem", "blocks.0", "blocks.0.act", "head"]
    stem = model.layers[0]
    assert stem.inputs == ((2, 3, 32, 32),)
    assert stem.attributes == {"kernel_size": "[7, 7]", "in_channels": "3"}
    assert model.input == (2, 3, 32, 32)


def test_a_norm_that_holds_its_activation_makes_an_output_besides_it() -> None:
    """timm's BatchNormAct2d: the table has the activation below the norm, and both give a tensor."""
    row = "│    │    └─ReLU: 3-3                    [8, 16, 8, 8]             --\n│    └─Block: 2-2"
    norm = "│    │    └─BatchNormAct2d: 3-3          [8, 16, 8, 8]             32\n"
    inside = "│    │    │    └─ReLU: 4-1               [8, 16, 8, 8]             --\n│    └─Block: 2-2"
    table = NESTED.replace(row, norm + inside).replace("4,858", "4,890").replace("2,490", "2,522")
    given = [(layer.kind, layer.output) for layer in read_text(table).described.layers[4:6]]
    assert given == [("BatchNormAct2d", (8, 16, 8, 8)), ("ReLU", (8, 16, 8, 8))]


def test_text_around_a_table_does_not_matter() -> None:
    around = "got it: 3\nRunning batch size 32\n" + NESTED + "\n\nactivations per sample: 5,768\nA×B = 1\n"
    assert read_text(around).described == read_text(NESTED).described


def test_a_printed_module_has_parameters_and_no_outputs() -> None:
    model = read_text(PRINTED, batch=8).described
    assert model.parameters == 2368 + 2 * (2304 + 32) + (3 * 256 + 3 * 16) + 272 + 170
    assert [layer.name for layer in model.layers][1:4] == ["blocks.0.conv", "blocks.0.norm", "blocks.0.act"]
    assert all(layer.output == () for layer in model.layers)
    assert model.layers[3].inplace
    assert model.layers[0].attributes["in_channels"] == "3"
    assert model.batch == 8


@pytest.mark.parametrize(("printed", "count"), MODULES.items())
def test_parameters_from_what_is_printed(printed: str, count: int) -> None:
    assert read_text(printed).described.parameters == count
    assert read_text(f"Net(\n  (0): {printed}\n)").described.parameters == count


def test_added_counts_tell_what_a_block_owns_and_what_is_shared() -> None:
    text = """\
Model(
  (words): Embedding(100, 16), 1,600 params
  (attention): Attention(
    (norm): LayerNorm((16,), eps=1e-12, elementwise_affine=True), 32 params
    (drop): Dropout(p=0.1, inplace=False), 0 params
  ), 1,056 params
  (mix): Conv1D(), 272 params
  (head): Linear(in_features=16, out_features=100, bias=False), 1,600 params
), 2,928 params
"""
    model = read_text(text).described
    assert {layer.name: layer.parameters for layer in model.layers} == {
        "words": 1600,
        "attention": 1024,
        "attention.norm": 32,
        "attention.drop": 0,
        "mix": 272,
        "head": 1600,
    }
    assert model.parameters == 2928  # the head shares the words' weight


def test_a_head_that_may_share_the_embeddings_weight_is_a_remark() -> None:
    words, head = "(words): Embedding(100, 16)", "(head): Linear(in_features=16, out_features=100, bias=False)"
    (remark,) = read_text(f"Model(\n  {words}\n  {head}\n)").remarks
    assert "head may share its 1,600 weights" in remark
    assert read_text(f"Model(\n  {words}\n  {head}\n), 1,600 params").remarks == ()  # counted by who knew
    assert read_text(f"Model(\n  {words}\n  {head.replace('100', '99')}\n)").remarks == ()


def test_an_added_count_over_modules_that_are_printed_once() -> None:
    text = "Net(\n  (0-2): 3 x Linear(in_features=4, out_features=5, bias=True)\n), 80 params"
    model = read_text(text).described
    assert [(layer.name, layer.parameters) for layer in model.layers] == [("", 5), ("0", 25), ("1", 25), ("2", 25)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "neither a table"),
        ("loss 0.1\nloss 0.2", "neither a table"),
        (FLAT.replace("             170", "          many"), "line 12"),
        (FLAT.replace("[-1, 16, 16, 16]", "16 16 16"), "line 5"),
        (FLAT.replace("2,304", "2,305"), "4,875 parameters, the total says 4,874"),
        (FLAT.partition("Block-6")[0], "line 3 .* cut off"),
        (NESTED.replace("2,304", "2.3 M"), "line 10"),
        (NESTED.replace("├─Linear: 1-6 ", "├─??? "), "line 15"),
        ("\n".join(FLAT.splitlines()[:4]) + "\n" + "=" * 64, "no layers follow"),
        (PRINTED.rpartition(")")[0], "line 1 .* not closed"),
        (PRINTED.replace("(gap): AdaptiveAvgPool2d(output_size=1)", "(gap): AdaptiveAvgPool2d"), "line 13"),
        (PRINTED.replace("bias=False)", "bias=False"), "line 5 .* brackets"),
        (PRINTED.replace("2 x Block", "3 x Block"), "line 4 .* 3 modules"),
        ("Net(\n  (norm): T5LayerNorm()\n)", "line 2 .* does not tell"),
        ("Net(\n  (norm): Linear(in_features=ten, out_features=3, bias=True)\n)", "line 2 .* does not tell"),
        ("Net(\n" + "  (a): Deep(\n" * 500, "deep in one another"),
    ],
)
def test_text_that_cannot_be_read_is_an_error_with_its_line(text: str, told: str) -> None:
    with pytest.raises(Usage, match=told) as caught:
        read_text(text)
    assert caught.value.hint


def test_a_batch_that_cannot_be() -> None:
    with pytest.raises(Usage, match="a batch of 0"):
        read_text(FLAT, batch=0)
