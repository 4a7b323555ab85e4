"""Modules of which prints or tables tell less than they are, and that are known nonetheless: those of T5, torchvision's
heads beside the last and convolutions of videos, attention in torchsummary's tables."""

from __future__ import annotations

import pytest

from carma.errors import Usage
from carma.trial.layers.description import Described
from gpumemnet.summaries import read_text

T5 = """\
T5ForConditionalGeneration(
  (shared): Embedding(1000, 64)
  (encoder): T5Stack(
    (embed_tokens): Embedding(1000, 64)
    (block): ModuleList(
      (0): T5Block(
        (layer): ModuleList(
          (0): T5LayerSelfAttention(
            (SelfAttention): T5Attention(
              (q): Linear(in_features=64, out_features=128, bias=False)
              (k): Linear(in_features=64, out_features=128, bias=False)
              (v): Linear(in_features=64, out_features=128, bias=False)
              (o): Linear(in_features=128, out_features=64, bias=False)
              (relative_attention_bias): Embedding(32, 8)
            )
            (layer_norm): T5LayerNorm()
            (dropout): Dropout(p=0.1, inplace=False)
          )
          (1): T5LayerFF(
            (DenseReluDense): T5DenseActDense(
              (wi): Linear(in_features=64, out_features=256, bias=False)
              (wo): Linear(in_features=256, out_features=64, bias=False)
              (dropout): Dropout(p=0.1, inplace=False)
              (act): ReLU()
            )
            (layer_norm): T5LayerNorm()
            (dropout): Dropout(p=0.1, inplace=False)
          )
        )
      )
    )
    (final_layer_norm): T5LayerNorm()
    (dropout): Dropout(p=0.1, inplace=False)
  )
  (lm_head): Linear(in_features=64, out_features=1000, bias=False)
)
"""
HEADS = """\
GoogLeNet(
  (stem): Conv2d(3, 512, kernel_size=(7, 7), stride=(16, 16), padding=(3, 3), bias=False)
  (later): Conv2d(512, 1024, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
  (aux1): InceptionAux(
    (conv): BasicConv2d(
      (conv): Conv2d(512, 128, kernel_size=(1, 1), stride=(1, 1), bias=False)
      (bn): BatchNorm2d(128, eps=0.001, momentum=0.1, affine=True, track_running_stats=True)
    )
    (fc1): Linear(in_features=2048, out_features=1024, bias=True)
    (fc2): Linear(in_features=1024, out_features=10, bias=True)
  )
  (avgpool): AdaptiveAvgPool2d(output_size=(1, 1))
  (fc): Linear(in_features=1024, out_features=10, bias=True)
)
"""
SWIN = """\
----------------------------------------------------------------
        Layer (type)               Output Shape         Param #
================================================================
            Conv2d-1           [-1, 96, 56, 56]           4,704
{rows}
         LayerNorm-6           [-1, 56, 56, 96]             192
SwinTransformerBlock-14           [-1, 56, 56, 96]               0
================================================================
Total params: {total}
Trainable params: {total}
Non-trainable params: 0
----------------------------------------------------------------
Input size (MB): 0.57
----------------------------------------------------------------
"""


def by_name(model: Described) -> dict[str, tuple[tuple[int, ...], int]]:
    return {layer.name: (layer.output, layer.parameters) for layer in model.layers}


def test_a_norm_of_t5_is_as_wide_as_the_layer_before() -> None:
    """Not as the table of distances, which is printed between them."""
    found = by_name(read_text(T5, batch=2, sample=(7,)).described)
    norms = {name: told for name, told in found.items() if name.endswith("layer_norm")}
    assert len(norms) == 3
    assert set(norms.values()) == {((2, 7, 64), 64)}


def test_dropouts_of_t5_are_where_they_are_called() -> None:
    found = by_name(read_text(T5, batch=2, sample=(7,)).described)
    inner = "encoder.block.0.layer.1.DenseReluDense"
    assert found[f"{inner}.dropout"][0] == found[f"{inner}.act"][0] == (2, 7, 256)
    assert found["encoder.block.0.layer.0.dropout"][0] == (2, 7, 64)


def test_encoder_and_decoder_have_one_table_of_words() -> None:
    found = by_name(read_text(T5, batch=2, sample=(7,)).described)
    assert found["shared"] == ((), 64_000)
    assert found["encoder.embed_tokens"] == ((2, 7, 64), 0)
    other = T5.replace("(embed_tokens): Embedding(1000, 64)", "(embed_tokens): Embedding(999, 64)")
    found = by_name(read_text(other, batch=2, sample=(7,)).described)
    assert found["shared"] == ((2, 7, 64), 64_000)
    assert found["encoder.embed_tokens"] == ((2, 7, 64), 999 * 64)


def test_a_norm_without_a_layer_before_it_has_unknown_parameters() -> None:
    with pytest.raises(Usage, match="line 2"):
        read_text("Net(\n  (norm): T5LayerNorm()\n  (fc): Linear(in_features=8, out_features=8, bias=True)\n)")


@pytest.mark.parametrize("kind", ["InceptionAux", "QuantizableInceptionAux"])
def test_a_head_beside_the_last_takes_what_was_made_earlier(kind: str) -> None:
    model = read_text(HEADS.replace("InceptionAux", kind), batch=2, sample=(3, 224, 224)).described
    found = {name: told[0] for name, told in by_name(model).items()}
    assert found["aux1.conv.conv"] == (2, 128, 4, 4)  # the means of four by four
    assert found["aux1.fc2"] == (2, 10)
    assert found["avgpool"] == (2, 1024, 1, 1)
    assert found["fc"] == (2, 10)


def test_the_head_beside_the_last_of_inception() -> None:
    head = """\
  (AuxLogits): InceptionAux(
    (conv0): Conv2d(512, 128, kernel_size=(1, 1), stride=(1, 1), bias=False)
    (conv1): Conv2d(128, 768, kernel_size=(2, 2), stride=(1, 1), bias=False)
    (fc): Linear(in_features=768, out_features=10, bias=True)
  )
"""
    text = HEADS.partition("  (aux1)")[0] + head + "  (avgpool)" + HEADS.partition("  (avgpool)")[2]
    found = {name: told[0] for name, told in by_name(read_text(text, batch=2, sample=(3, 224, 224)).described).items()}
    assert found["stem"] == (2, 512, 14, 14)
    assert found["AuxLogits.conv0"] == (2, 128, 4, 4)  # of five by five, in steps of three
    assert found["fc"] == (2, 10)


@pytest.mark.parametrize(("kind", "kernel"), [("Conv3DSimple", "(3, 3, 3)"), ("Conv3DNoTemporal", "(1, 3, 3)")])
def test_convolutions_of_videos(kind: str, kernel: str) -> None:
    around = kernel.replace("1", "0").replace("3", "1")
    brackets = f"3, 8, kernel_size={kernel}, stride=(1, 2, 2), padding={around}, bias=False"
    (layer,) = read_text(f"Net(\n  (conv): {kind}({brackets})\n)", batch=2, sample=(3, 16, 32, 32)).described.layers
    area = 27 if kind == "Conv3DSimple" else 9
    assert (layer.output, layer.parameters) == ((2, 8, 16, 16, 16), 3 * 8 * area)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("ShiftedWindowAttention-5", "[-1, 56, 56, 96]"),
        ("MultiheadAttention-5", "[[-1, 50, 96], [-1, 50, 50]]"),
    ],
)
def test_projections_that_torchsummary_does_not_count(kind: str, shape: str) -> None:
    read = read_text(SWIN.format(rows=f"{kind}           {shape}               0", total="4,896"), batch=2)
    added = 4 * 96 * 97
    assert [layer.parameters for layer in read.described.layers] == [4_704, added, 192]
    assert read.described.parameters == 4_896 + added
    assert f"the {added:,} of projections are added" in read.remarks[0]
    whole = SWIN.format(rows=f"{kind}           {shape}               7", total="4,903")
    assert read_text(whole, batch=2).described.parameters == 4_903  # where they are counted


def test_a_recurrent_layer_is_no_block_of_others() -> None:
    """It has no parameters in torchsummary's table, and was once passed over."""
    read = read_text(SWIN.format(rows="LSTM-5           [[-1, 56, 96], [-1, 2, 96]]         0", total="4,896"))
    assert [layer.kind for layer in read.described.layers] == ["Conv2d", "LSTM", "LayerNorm"]


UNCALLED = """\
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
GoogLeNet                                [8, 10]                   {own}
├─Linear: 1-1                            [8, 10]                   2,570
==========================================================================================
Total params: {total}
==========================================================================================
"""


@pytest.mark.parametrize(("own", "total", "is_said"), [("2,000", "4,570", True), ("100", "2,670", False)])
def test_modules_that_were_not_called_when_a_table_was_printed(own: str, total: str, is_said: bool) -> None:
    gaps = read_text(UNCALLED.format(own=own, total=total)).gaps
    assert [("of GoogLeNet are of no layer" in gap, 'mode="train"' in gap) for gap in gaps] == [(True, True)] * is_said
