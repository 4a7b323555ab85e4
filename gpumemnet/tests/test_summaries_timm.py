"""Models as timm prints them: classes of its own, norms that hold their activation, scales whose size is not told."""

from __future__ import annotations

import pytest

from carma.errors import Usage
from carma.trial.layers.description import ReadSummary
from gpumemnet.summaries import read_text

POOL = "(global_pool): SelectAdaptivePool2d(pool_type=avg, flatten=Flatten(start_dim=1, end_dim=-1))"
NORM_ACT = """\
Net(
  (conv): Conv2d(3, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
  (bn): BatchNormAct2d(
    8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True
    (drop): Identity()
    (act): SiLU(inplace=True)
  )
  (pw): Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1), bias=False)
)"""


def net(*modules: str) -> str:
    return "\n".join(["Net(", *(f"  {module}" for module in modules), ")"])


def made(text: str, sample: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    read = read_text(text, batch=2, sample=sample)
    return {layer.name: layer.output for layer in read.described.layers}


def parameters(read: ReadSummary) -> dict[str, int]:
    return {layer.name: layer.parameters for layer in read.described.layers}


def test_a_norm_that_holds_its_activation_has_its_own_parameters_and_output() -> None:
    read = read_text(NORM_ACT, batch=2, sample=(3, 32, 32))
    assert parameters(read) == {"conv": 216, "bn": 16, "bn.drop": 0, "bn.act": 0, "pw": 32}
    assert {layer.output for layer in read.described.layers if layer.name.startswith("bn")} == {(2, 8, 16, 16)}
    assert [layer.inplace for layer in read.described.layers] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("pool", "output"),
    [
        (POOL, (2, 8)),
        ("(global_pool): SelectAdaptivePool2d (pool_type=avg, flatten=True)", (2, 8)),
        ("(global_pool): SelectAdaptivePool2d(pool_type=avg, flatten=Identity())", (2, 8, 1, 1)),
        ("(global_pool): SelectAdaptivePool2d(pool_type=catavgmax, flatten=Flatten(start_dim=1))", (2, 16)),
        ("(global_pool): GlobalAvgPool2d()", (2, 8, 1, 1)),
        ("(global_pool): BlurPool2d()", (2, 8, 8, 8)),
        ("(global_pool): MaxPool2dSame(kernel_size=(3, 3), stride=(2, 2), padding=(0, 0))", (2, 8, 8, 8)),
    ],
)
def test_pools_have_no_parameters(pool: str, output: tuple[int, ...]) -> None:
    text = net("(conv): Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1), bias=False)", pool)
    read = read_text(text, batch=2, sample=(3, 15, 15))
    assert read.described.parameters == 24
    assert read.described.layers[-1].output == output


@pytest.mark.parametrize(
    ("kind", "more", "output"),
    [
        ("Conv2dSame(3, 8, kernel_size=(3, 3), stride=(2, 2), bias=False)", 0, (2, 8, 8, 8)),
        ("StdConv2d(3, 8, kernel_size=(3, 3), stride=(2, 2), bias=False)", 0, (2, 8, 7, 7)),
        ("ScaledStdConv2d(3, 8, kernel_size=(3, 3), stride=(2, 2), bias=False)", 8, (2, 8, 7, 7)),
        ("ScaledStdConv2dSame(3, 8, kernel_size=(3, 3), stride=(2, 2), bias=False)", 8, (2, 8, 8, 8)),
    ],
)
def test_convolutions_of_its_own(kind: str, more: int, output: tuple[int, ...]) -> None:
    read = read_text(net(f"(conv): {kind}"), batch=2, sample=(3, 15, 15))
    assert (read.described.parameters, read.described.layers[0].output) == (216 + more, output)


def test_a_scale_has_a_parameter_for_each_channel_that_the_layer_before_it_makes() -> None:
    text = net(
        "(conv): Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))",
        "(ls1): LayerScale2d()",
        "(norm): GroupNorm1(1, 8, eps=1e-05, affine=True, bias=True)",
        "(scale): Scale()",
        "(fc): Linear(in_features=8, out_features=5, bias=True)",
        "(drop): Dropout(p=0.1, inplace=False)",
        "(ls2): LayerScale()",
        "(affine): Affine()",
    )
    read = read_text(text, batch=2)
    assert parameters(read) == {
        "conv": 32, "ls1": 8, "norm": 16, "scale": 8, "fc": 45, "drop": 0, "ls2": 5, "affine": 10
    }  # fmt: skip
    assert read.remarks == ()


def test_unknown_parameters_count_as_none_with_a_remark() -> None:
    layers = (f"(conv{place}): Conv2d(3, 3, kernel_size=(1, 1), stride=(1, 1))" for place in range(4))
    text = net(*layers, "(pos): PosEmbedRel()", "(place): TableOfPlaces()")
    read = read_text(text, batch=2, sample=(3, 8, 8))
    assert read.described.parameters == 48
    assert any("2 modules (PosEmbedRel, TableOfPlaces)" in remark for remark in read.remarks)
    assert {layer.name: layer.output for layer in read.described.layers if "p" in layer.name} == {
        "pos": (),
        "place": (2, 3, 8, 8),
    }


@pytest.mark.parametrize("unknown", ["SparseLinear()", "FancyAttention()", "CondConv2d(3, 8, kernel_size=(3, 3))"])
def test_a_layer_by_its_name_must_tell_its_parameters(unknown: str) -> None:
    layers = (f"(conv{place}): Conv2d(3, 3, kernel_size=(1, 1), stride=(1, 1))" for place in range(4))
    with pytest.raises(Usage, match="line 6"):
        read_text(net(*layers, f"(odd): {unknown}"), batch=2)


def test_more_unknown_than_known_layers_are_an_error() -> None:
    with pytest.raises(Usage, match="line 3"):
        read_text(net("(conv): Conv2d(3, 3, kernel_size=(1, 1), stride=(1, 1))", "(odd): Odd()"), batch=2)


def test_a_gate_without_a_pool_takes_the_mean_of_each_channel() -> None:
    text = net(
        "(conv): Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))",
        "(se): SqueezeExcite(",
        "  (conv_reduce): Conv2d(8, 2, kernel_size=(1, 1), stride=(1, 1))",
        "  (act1): SiLU(inplace=True)",
        "  (conv_expand): Conv2d(2, 8, kernel_size=(1, 1), stride=(1, 1))",
        "  (gate): Sigmoid()",
        ")",
        "(pwl): Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1))",
    )
    outputs = made(text, (3, 16, 16))
    assert outputs["se.conv_reduce"] == (2, 2, 1, 1)
    assert outputs["se.gate"] == (2, 8, 1, 1)
    assert outputs["pwl"] == (2, 4, 16, 16)


def test_a_block_may_split_its_channels_and_a_chain_may_not() -> None:
    text = net(
        "(stem): Conv2d(3, 16, kernel_size=(1, 1), stride=(1, 1))",
        "(stage): %s(",
        "  (down): Conv2d(16, 32, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))",
        "  (conv): Conv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))",
        ")",
    )
    assert made(text % "Stage", (3, 16, 16))["stage.conv"] == (2, 8, 8, 8)
    with pytest.raises(Usage, match="it takes 8 channels"):
        made(text % "Sequential", (3, 16, 16))


def test_half_of_what_came_last_is_taken_rather_than_something_larger() -> None:
    text = net(
        "(stem): Conv2d(3, 16, kernel_size=(1, 1), stride=(1, 1))",
        "(stage): Stage(",
        "  (down): Conv2d(16, 32, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))",
        "  (expand): Conv2d(32, 32, kernel_size=(1, 1), stride=(1, 1))",
        "  (blocks): Sequential(",
        "    (0): Conv2d(16, 16, kernel_size=(1, 1), stride=(1, 1))",
        "  )",
        ")",
    )
    assert made(text, (3, 16, 16))["stage.blocks.0"] == (2, 16, 8, 8)


def test_layers_behind_a_shortcut_take_what_it_was_called_with() -> None:
    text = net(
        "(stem): Conv2d(3, 16, kernel_size=(1, 1), stride=(1, 1))",
        "(block): Block(",
        "  (shortcut): Conv2d(16, 16, kernel_size=(1, 1), stride=(2, 2))",
        "  (conv): Conv2d(16, 16, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))",
        ")",
    )
    assert made(text, (3, 16, 16))["block.conv"] == (2, 16, 8, 8)


def test_modules_that_make_as_many_channels_as_are_wanted_lie_side_by_side() -> None:
    text = net(
        "(stem): Conv2d(3, 16, kernel_size=(1, 1), stride=(1, 1))",
        "(mixed): Mixed(",
        "  (pool): MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "  (conv): Conv2d(16, 24, kernel_size=(2, 2), stride=(2, 2))",
        ")",
        "(next): Conv2d(40, 8, kernel_size=(1, 1), stride=(1, 1))",
    )
    outputs = made(text, (3, 16, 16))
    assert (outputs["mixed.conv"], outputs["next"]) == ((2, 24, 8, 8), (2, 8, 8, 8))


def test_the_places_of_an_image_are_rows_that_can_be_mixed() -> None:
    text = net(
        "(stem): Conv2d(3, 6, kernel_size=(4, 4), stride=(4, 4))",
        "(block): MixerBlock(",
        "  (norm1): LayerNorm((6,), eps=1e-06, elementwise_affine=True, bias=True)",
        "  (tokens): Linear(in_features=16, out_features=9, bias=True)",
        "  (back): Linear(in_features=9, out_features=16, bias=True)",
        "  (norm2): LayerNorm((6,), eps=1e-06, elementwise_affine=True, bias=True)",
        ")",
    )
    outputs = made(text, (3, 16, 16))
    assert list(outputs.values())[1:] == [(2, 16, 6), (2, 6, 9), (2, 6, 16), (2, 16, 6)]


def test_keys_of_fewer_places_do_not_shrink_what_attention_makes() -> None:
    text = net(
        "(stem): Conv2d(3, 6, kernel_size=(2, 2), stride=(2, 2))",
        "(norm): LayerNorm((6,), eps=1e-06, elementwise_affine=True, bias=True)",
        "(attn): Attention(",
        "  (q): Linear(in_features=6, out_features=6, bias=True)",
        "  (proj): Linear(in_features=6, out_features=6, bias=True)",
        "  (sr): Conv2d(6, 6, kernel_size=(4, 4), stride=(4, 4))",
        "  (norm): LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)",
        ")",
        "(norm2): LayerNorm((6,), eps=1e-06, elementwise_affine=True, bias=True)",
        "(head): Conv2d(6, 4, kernel_size=(1, 1), stride=(1, 1))",
    )
    outputs = made(text, (3, 16, 16))
    assert (outputs["attn.sr"], outputs["norm2"], outputs["head"]) == ((2, 6, 2, 2), (2, 64, 6), (2, 4, 8, 8))


def test_space_becomes_depth_as_the_next_layer_wants_it() -> None:
    text = net("(s2d): SpaceToDepth()", "(conv): Conv2d(48, 8, kernel_size=(1, 1), stride=(1, 1))")
    assert made(text, (3, 16, 16)) == {"s2d": (2, 48, 4, 4), "conv": (2, 8, 4, 4)}


HIERA = """\
Hiera(
  (patch_embed): PatchEmbed(
    (proj): Conv2d(3, 8, kernel_size=(7, 7), stride=(4, 4), padding=(3, 3))
  )
  (blocks): ModuleList(
    (0): HieraBlock(
      (norm1): LayerNorm((8,), eps=1e-06, elementwise_affine=True, bias=True)
      (attn): MaskUnitAttention(
        (qkv): Linear(in_features=8, out_features=24, bias=True)
        (proj): Linear(in_features=8, out_features=8, bias=True)
      )
      (norm2): LayerNorm((8,), eps=1e-06, elementwise_affine=True, bias=True)
    )
    (1): HieraBlock(
      (norm1): LayerNorm((8,), eps=1e-06, elementwise_affine=True, bias=True)
      (proj): Linear(in_features=8, out_features=16, bias=True)
      (attn): MaskUnitAttention(
        (qkv): Linear(in_features=8, out_features=48, bias=True)
        (proj): Linear(in_features=16, out_features=16, bias=True)
      )
      (norm2): LayerNorm((16,), eps=1e-06, elementwise_affine=True, bias=True)
    )
  )
)"""


def test_a_stage_of_hiera_begins_with_a_quarter_of_the_queries() -> None:
    found = made(HIERA, (3, 64, 64))
    assert found["blocks.0.norm2"] == (2, 256, 8)
    assert found["blocks.1.attn.qkv"] == (2, 256, 48)
    assert found["blocks.1.norm2"] == (2, 64, 16)
