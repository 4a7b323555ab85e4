"""GPUMemNet's arithmetic: sums, joins, skips and gates. What comes and goes is listed layer by layer, in MiB."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.trial.layers.description import Layer
from gpumemnet_fixtures.allocator_watch import conv, follow, layer, linear, mib, model, played

WORDS, WIDTH, ONE = (8, 256), 1_024, 8  # MiB of 8 × 256 words of width 1,024
NORM = layer("LayerNorm", *WORDS, WIDTH, parameters=2 * WIDTH)
SQUARE = linear(WIDTH, *WORDS, WIDTH)  # 4 MiB of weights
HEAD = linear(WIDTH, *WORDS, 512)  # 2 MiB of weights, 4 come out
DROPOUT, GELU = layer("Dropout", *WORDS, WIDTH), layer("GELU", *WORDS, WIDTH)
IDENTITY, NOTHING = layer("Identity", *WORDS, WIDTH), replace(DROPOUT, attributes={"p": "0.0"})
ATTENTION = layer("WindowAttention", *WORDS, WIDTH, parameters=4 * WIDTH * WIDTH)
LOSS = (4, 4, 4, -4, -4)


@pytest.mark.parametrize(
    ("layers", "sums"),
    [
        ((SQUARE, NORM), [1]),
        ((NORM, SQUARE, DROPOUT, NORM), [3]),
        ((NORM, ATTENTION, NORM), [2]),
        ((SQUARE, IDENTITY, NORM), [2]),  # as timm prints a branch that drops nothing
        ((SQUARE, NOTHING, IDENTITY, DROPOUT, NORM), [4]),
        ((SQUARE, GELU, IDENTITY, NORM), []),
        ((SQUARE, GELU, NORM), []),  # no branch ends in a function
        ((NORM, NORM), []),
        ((linear(WIDTH, *WORDS, 2 * WIDTH), NORM), []),  # it does not take what is before it
    ],
)
def test_a_norm_behind_a_branch_takes_a_sum(layers: tuple[Layer, ...], sums: list[int]) -> None:
    found = played(model(*layers, input=(*WORDS, WIDTH))).sizes.is_sum
    assert [place for place, is_sum in enumerate(found) if is_sum] == sums


def test_the_sum_is_a_tensor_in_place_of_the_branchs_end() -> None:
    branch_end, whole, normed = 8, 8, 8
    assert played(model(SQUARE, NORM, HEAD)).forward == (8, branch_end, whole, -branch_end, normed, 4, *LOSS)
    assert played(model(SQUARE, GELU, NORM, HEAD)).forward == (8, 8, 8, 8, 4, *LOSS)  # no sum: all are kept


def test_a_layer_that_returns_its_input_changes_nothing() -> None:
    """Neither the sum nor the gradient that waits for the other branch."""
    plain = played(model(NORM, SQUARE, NORM, SQUARE, NORM, HEAD)).events
    assert played(model(NORM, SQUARE, IDENTITY, NORM, SQUARE, NOTHING, IDENTITY, NORM, HEAD)).events == plain


def test_what_drops_whole_samples_is_played_without_a_mask() -> None:
    path = layer("DropPath", *WORDS, WIDTH)
    mask = ONE // 4
    assert played(model(SQUARE, DROPOUT, NORM, HEAD)).kept - played(model(SQUARE, path, NORM, HEAD)).kept == mask


def test_under_autocast_the_sum_is_what_the_norm_makes_of_it() -> None:
    """Of a narrow tensor a norm keeps a copy of 32 bits: that stands for the sum."""
    narrow_weights, narrow_input, branch_end, copy, normed = 2, 4, 4, 8, 8
    found = played(model(SQUARE, NORM, HEAD, autocast="bfloat16")).forward
    assert found[:7] == (8, narrow_weights, narrow_input, branch_end, copy, normed, -branch_end)


def test_where_a_block_begins_that_is_computed_again_the_sum_was_made_before() -> None:
    layers = (NORM, SQUARE) * 3
    again, plain = (played(model(*layers, checkpointing=one)).sizes for one in (True, False))
    assert plain.adds == [False, False, True, False, True, False]
    assert again.adds == [False] * 6
    assert again.is_sum == plain.is_sum


def test_a_gradient_waits_beside_its_branch() -> None:
    """From the sum on it goes two ways; the norm that begins the branch is where they meet again."""
    wide = layer("GELU", *WORDS, 2 * WIDTH)
    up, down = linear(WIDTH, *WORDS, 2 * WIDTH), linear(2 * WIDTH, *WORDS, WIDTH)  # 8 MiB of weights each
    assert played(model(GELU, GELU, NORM, up, wide, down, NORM, HEAD)).back == (
        *(8, 2, -4, -8),  # head: its input's gradient, its weights'; the gradient it was given and what it kept go
        *(8, -8, -8),  # the norm behind the sum
        *(16, 8, -16),  # down: the gradient that it was given stays
        *(16, -16, -16),
        *(8, 8, -16, -8),  # up
        *(8, -8, -8, -8),  # the norm: what waited goes, what it was given and what it kept
        *(8, -8, -8),
        -8,
        *(-8, -4),  # what went into the network, and what came out
        *(-2, -8, -8),  # gradients of the weights, after the step
    )  # fmt: skip


def test_where_an_input_was_cast_its_gradient_comes_narrow_first() -> None:
    found = played(model(NORM, SQUARE, HEAD, autocast="bfloat16"))
    assert [mib(size) for size in found.sizes.copies] == [0, 4, 0]
    assert follow(found.back, 4, 8, -4)  # the copy's, and what is made of it


IMAGE, FIGURES = (8, 64, 64, 64), (8, 64, 1, 1)  # 8 MiB in 64 channels
STEM, LAST = conv(64, *IMAGE), conv(64, 8, 32, 64, 64)  # 4 MiB come out at the end


HALF, UP = layer("AvgPool2d", 8, 64, 32, 32), layer("Upsample", 8, 128, 64, 64)
DEEP, JOINED = conv(64, 8, 128, 32, 32), conv(192, 8, 32, 64, 64)  # the last takes 16 MiB that UP gives and 8 of before


def test_the_gradient_of_a_skip_is_held_until_its_layer() -> None:
    """Of a U-Net: the gradient of what was joined is one tensor, of which the earlier layer has a view."""
    found = played(model(layer("GELU", *IMAGE), STEM, HALF, DEEP, UP, JOINED))
    assert found.sizes.skips == {5: 1}
    assert found.back == (
        *(24, -4, -24),  # the gradient of both; the joined tensor was kept
        4,  # it was given a view
        *(2, -4, -2),
        *(8, -2, -8),  # pooling
        *(8, -8, -8, -24),  # the earlier layer: what came down goes, what it kept, and what was held
        -8,
        *(-8, -4),  # what went into the network, and what came out
    )  # fmt: skip


def test_the_gradient_of_a_skip_from_a_view_is_held_until_the_end() -> None:
    """A view has no turn of its own; nothing is left over all the same."""
    found = played(model(STEM, layer("Identity", *IMAGE), HALF, DEEP, UP, JOINED))
    assert found.sizes.skips == {5: 1}
    assert found.back[-3:] == (-24, -8, -4)
    assert found.left == 0


def test_layers_that_take_what_is_before_them_have_no_skip() -> None:
    assert played(model(STEM, STEM, LAST)).sizes.skips == {}


def test_under_autocast_a_join_is_as_wide_as_the_widest() -> None:
    """What went into the network has 32 bits, and so has each tensor that it is joined to. All are cast: the copies
    stay, a joined tensor lasts until the next one is there."""
    dense = [conv(into, 8, 32, 64, 64) for into in (64, 96, 128)]
    found = played(model(*dense, input=IMAGE, autocast="bfloat16"))
    assert [mib(size) for size in found.sizes.inputs] == [8, 12, 16]
    assert [mib(size) for size in found.sizes.copies] == [4, 6, 8]
    assert found.forward == (
        *(8, 4, 2),
        *(6, 12, 2, -2),  # copy, joined, output; what came before is in the copy
        *(8, 16, -12, 2, -2),
        -16,
        *(4, 4, 2, -4, -4),  # the loss
    )  # fmt: skip


def test_a_join_of_half_precision_tensors_has_half_precision_and_is_kept() -> None:
    found = played(model(conv(3, *IMAGE), LAST, conv(96, 8, 32, 64, 64), input=(8, 3, 64, 64), autocast="bfloat16"))
    assert [mib(size) for size in found.sizes.inputs[1:]] == [4, 6]
    assert (found.sizes.copies[2], found.sizes.joined[2]) == (0, 0)
    assert [event for event in found.forward if abs(event) == 6] == [6]


def test_a_function_that_writes_over_a_gates_product_has_a_tensor_of_its_own() -> None:
    """Behind a gate what is written over is neither the gate's figures nor what was kept of before."""
    squeeze = (layer("AdaptiveAvgPool2d", *FIGURES), conv(64, *FIGURES), layer("Sigmoid", *FIGURES))
    norm = layer("BatchNorm2d", *IMAGE, parameters=128)
    over = Layer(kind="ReLU", output=IMAGE, inputs=(IMAGE,), inplace=True)
    plain, gated = (played(model(STEM, norm, *gate, over, LAST)).forward for gate in ((), squeeze))
    assert list(plain) == [8, 8, 8, 4, *LOSS]  # written over what the norm gave
    assert list(gated) == [8, 8, 8, 8, -8, 8, 4, *LOSS]  # the gate keeps what it is multiplied with; the product


@pytest.mark.parametrize(
    ("norm", "inplace", "copies"),
    [("InstanceNorm2d", True, 2), ("InstanceNorm2d", False, 0), ("BatchNorm2d", True, 0)],
)
def test_what_writes_over_an_instance_norms_view_has_its_gradient_copied(norm: str, inplace: bool, copies: int) -> None:
    layers = (STEM, layer(norm, *IMAGE, parameters=128), layer("ReLU", *IMAGE, inplace=inplace), LAST)
    found = played(model(*layers))
    assert found.sizes.back_more == [0, 0, copies, 0]
    behind = (8, -4)  # the last layer's, without its weights
    assert found.back[: 3 + 2 * copies] == (*behind, *([8] * (1 + copies)), *([-8] * copies))


ROWS = 2_048


def through(kind: str) -> tuple[Layer, ...]:
    return linear(512, ROWS, 1_024), layer(kind, ROWS, 1_024), linear(1_024, ROWS, 256)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Softsign", 1), ("QuickGELUActivation", 1), ("NewGELUActivation", 3), ("FastGELUActivation", 5), ("SiLU", 0)],
)
def test_functions_that_are_written_out_keep_their_parts(kind: str, more: int) -> None:
    plain, parts = (played(model(*through(one), input=(ROWS, 512))) for one in ("GELU", kind))
    assert plain.kept == 4 + 8 + 8 + 2 + 2  # what went in, the function's input and output, the last and its gradient
    assert parts.kept == plain.kept + more * 8


@pytest.mark.parametrize(("share", "mask"), [("0.1", 2), ("0.0", 0), ("0", 0)])
def test_a_dropout_of_zero_is_a_view(share: str, mask: float) -> None:
    first, function, last = through("ReLU")
    dropout = Layer(kind="Dropout", output=function.output, attributes={"p": share})
    plain, dropped = (
        played(model(*layers, input=(ROWS, 512)))
        for layers in ((first, function, last), (first, function, dropout, last))
    )
    output = 8 if mask else 0  # another tensor than the function's, which is kept as well
    assert dropped.kept == plain.kept + mask + output
    assert (dropped.events == plain.events) is not bool(mask)


@pytest.mark.parametrize(
    ("kind", "more"), [("Softsign", 4), ("PReLU", 1), ("Tanhshrink", 1), ("GELU", 0), ("LogSigmoid", 0)]
)
def test_functions_that_need_room_on_the_way_back(kind: str, more: int) -> None:
    back = played(model(*through(kind), input=(ROWS, 512))).back
    last = (8, -2, -8)  # its input's gradient; the one it was given and what it kept go; its weights are small
    assert back[: 5 + 2 * more] == (*last, 8, *([8] * more), *([-8] * more), -8)


def test_logsigmoid_keeps_its_input_and_sigmoid_its_output() -> None:
    logarithm, plain, output = (
        played(model(*through(kind), input=(ROWS, 512))).forward for kind in ("LogSigmoid", "GELU", "Sigmoid")
    )
    assert logarithm == plain
    assert sum(output) == sum(plain) - 8


@pytest.mark.parametrize(("kind", "gives", "cast"), [("Softplus", 8, 4), ("GELU", 4, 0), ("ReLU", 4, 0)])
def test_softplus_uses_32_bits_under_autocast(kind: str, gives: float, cast: float) -> None:
    sizes = played(model(*through(kind), input=(ROWS, 512), autocast="bfloat16")).sizes
    assert mib(sizes.outputs[1]) == gives
    assert mib(sizes.copies[2]) == cast  # the linear layer behind it has it narrow


@pytest.mark.parametrize(
    ("changed", "end", "expected"),
    [
        ({}, (), (4, 4, 4)),
        ({"autocast": "bfloat16"}, (), (4, 4, 2)),  # from a narrow output, in 32 bits; its gradient is narrow again
        ({"autocast": "bfloat16"}, (layer("LayerNorm", ROWS, 512),), (4, 4, 4)),
        ({"dtype": "bfloat16"}, (), (2, 2, 2)),
    ],
)
def test_the_loss_keeps_logarithms_and_their_gradient_for_a_moment(
    changed: dict[str, object], end: tuple[Layer, ...], expected: tuple[float, ...]
) -> None:
    kept, passed, gradient = expected
    found = played(model(linear(1_024, ROWS, 512), *end, input=(ROWS, 1_024), **changed))
    assert found.forward[-5:] == (kept, passed, gradient, -passed, -kept)
