"""What cuDNN takes for a convolution: formulas worked out by hand, measured shapes first, and the shipped model."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from carma.trial.replay import card_constants as constants
from carma.trial.replay.conv_formulas import OTHER, formula_bytes
from carma.trial.replay.conv_shapes import (
    FORWARD,
    INPUT_GRAD,
    ConvShape,
    Row,
    features,
    of_call,
    of_row,
    tensor_bytes,
)
from carma.trial.replay.conv_workspaces import (
    SHIPPED,
    ConvModel,
    ConvWorkspaces,
    DecisionTree,
    LearntChoice,
    convolutions_of,
    shipped_convolutions,
    shipped_model,
)
from carma.trial.replay.library_memory import card_workspaces
from carma.trial.replay.replay import NO_SCRATCH
from carma.trial.report import Call

MIB = 1 << 20


def call(
    op: str = "conv",
    image: tuple[int, ...] = (16, 512, 14, 14),
    weight: tuple[int, ...] = (512, 512, 3, 3),
    output: tuple[int, ...] = (16, 512, 14, 14),
    numbers: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1),
    dtype: str = "float32",
    flags: tuple[str, ...] = ("tf32",),
) -> Call:
    return Call(op=op, dtype=dtype, sizes=(image, weight, output), numbers=numbers, flags=flags)


def shape(made: Call) -> ConvShape:
    found = of_call(made)
    assert found is not None
    return found


def row(**changes: object) -> Row:
    """A row as the measurement of a card writes it: the same convolution as `call()`."""
    return {
        "op": "convolution",
        "source": "resnet",
        "n": 16,
        "cin": 512,
        "cout": 512,
        "size": [14, 14],
        "kernel": [3, 3],
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "groups": 1,
        "transposed": False,
        "dtype": "fp32",
        "tf32": True,
        "channels_last": False,
        "mode": "default",
        "direction": "forward",
        "out_bytes": 100,
        "peak_bytes": 12_345,
        "kept_bytes": 100,
        "backend": "Cudnn",
        **changes,
    }


LEAF_ZERO = DecisionTree(feature=(-1,), threshold=(0,), right=(0,))


def model(*formulas: str, choose: tuple[DecisionTree, ...] = (LEAF_ZERO,)) -> ConvModel:
    """A forest that says the first formula, with 2^20 bytes on top, and twice the tensors where no formula holds."""
    learnt = LearntChoice(
        formulas=formulas,
        choose=choose,
        more=(DecisionTree(feature=(-1,), threshold=(20,), right=(0,)),),
        other=(DecisionTree(feature=(-1,), threshold=(1,), right=(0,)),),
    )
    return ConvModel(gpu="a card", torch="2.11", rows=1, call=learnt, trial=learnt)


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        # Each was measured on an H200, less the few hundred bytes of the engine's own.
        ("xyw@1", call(image=(64, 128, 56, 56), weight=(256, 128, 3, 3), output=(64, 256, 56, 56), dtype="bfloat16"),
         154_730_643 - 147),
        ("xyw@32", call(image=(64, 1008, 8, 8), weight=(1008, 48, 3, 3), output=(64, 1008, 4, 4),
                        numbers=(2, 2, 1, 1, 1, 1, 21)), 30_621_843 - 147),
        ("sums", call("conv_weight_grad", (16, 320, 7, 7), (1280, 320, 1, 1), (16, 1280, 7, 7),
                      (1, 1, 0, 0, 1, 1, 1), "bfloat16"), 26_214_400),
        ("winograd", call("conv_weight_grad", (16, 256, 21, 21), (512, 256, 3, 3), (16, 512, 21, 21), flags=()),
         82_575_360),
        ("xyw@1+winograd", call("conv_weight_grad", (512, 48, 42, 42), (192, 48, 3, 3), (512, 192, 42, 42),
                                flags=("channels_last",)), 3_009_761_296 - 16),
        ("fft32", call("conv_input_grad", (50, 1024, 64, 64), (512, 1024, 3, 3), (50, 512, 64, 64), flags=()),
         2_950_168_576),
        ("fft", call("conv", (32, 2048, 28, 28), (512, 2048, 3, 3), (32, 512, 28, 28), flags=()), 9_734_979_584),
        ("fft", call("conv", (96, 128, 32, 32), (32, 128, 3, 3), (96, 32, 32, 32), flags=()), 553_795_584),
        ("fftw", call("conv_weight_grad", (128, 192, 28, 28), (48, 192, 3, 3), (128, 48, 28, 28), flags=()),
         286_654_464),
    ],
)  # fmt: skip
def test_a_formula_gives_what_was_measured(name: str, made: Call, expected: int) -> None:
    assert formula_bytes(name, shape(made)) == expected


def test_every_formula_can_be_worked_out_for_every_rank() -> None:
    volume = call(image=(2, 8, 4, 6, 6), weight=(16, 8, 3, 3, 3), output=(2, 16, 4, 6, 6), numbers=(1,) * 9 + (1,))
    for made in (call(), volume):
        assert all(formula_bytes(name, shape(made)) >= 0 for name in shipped_model().call.formulas if name != OTHER)


def test_a_row_and_a_call_of_the_same_convolution_are_the_same_shape() -> None:
    assert of_row(row()) == of_call(call())


def test_a_transposed_row_is_the_other_direction_of_a_plain_one() -> None:
    up = row(transposed=True, cin=512, cout=256, size=[4, 4], kernel=[4, 4], stride=[2, 2], backend="CudnnTranspose")
    found = of_row(up)
    assert found is not None
    assert (found.direction, found.image, found.weight, found.output) == (
        INPUT_GRAD, (16, 256, 8, 8), (512, 256, 4, 4), (16, 512, 4, 4),
    )  # fmt: skip
    back = of_row({**up, "direction": "dgrad"})
    assert back is not None
    assert back.direction == FORWARD


def test_one_dimension_is_run_as_two() -> None:
    length = row(size=[100], kernel=[3], stride=[2], padding=[1], dilation=[1])
    made = call(
        image=(16, 512, 1, 100), weight=(512, 512, 1, 3), output=(16, 512, 1, 50), numbers=(1, 2, 0, 1, 1, 1, 1)
    )
    assert of_row(length) == of_call(made)


@pytest.mark.parametrize("changes", [{"op": "operator"}, {"backend": "CudaDepthwise2d"}])
def test_what_cudnn_was_not_asked_for_is_no_shape(changes: dict[str, object]) -> None:
    assert of_row(row(**changes)) is None


@pytest.mark.parametrize(
    "made",
    [
        call(op="sdpa"),
        call(dtype="complex64"),
        call(numbers=(1, 1, 1)),
        call(image=(0, 512, 14, 14), output=(0, 512, 14, 14)),
    ],
)
def test_a_call_that_says_too_little_takes_nothing(made: Call) -> None:
    assert shipped_convolutions()(made) == NO_SCRATCH


def test_a_measured_shape_goes_before_the_model() -> None:
    workspaces = ConvWorkspaces.from_rows([row(), row(op="operator")], model("xyw@1"))
    assert workspaces(call()).transient_bytes == (12_245,)
    assert workspaces(call(dtype="float16")).transient_bytes == (tensor_bytes(shape(call(dtype="float16"))),)


def test_tf32_matters_to_fp32_only() -> None:
    assert of_call(call(flags=())) != of_call(call())
    assert of_call(call(dtype="bfloat16", flags=())) == of_call(call(dtype="bfloat16"))


def test_a_tree_goes_right_above_its_threshold_and_left_otherwise() -> None:
    batch = features(shape(call())).index(features(shape(call()))[5])
    tree = DecisionTree(feature=(batch, -1, -1), threshold=(5.0, 7, 8), right=(2, 0, 0))
    assert tree(features(shape(call()))) == 7
    more = call(image=(32, 512, 14, 14), output=(32, 512, 14, 14))
    assert tree(features(shape(more))) == 8


def test_the_forest_votes_and_a_remainder_comes_on_top() -> None:
    one, other = LEAF_ZERO, DecisionTree(feature=(-1,), threshold=(1,), right=(0,))
    copies = tensor_bytes(shape(call()))
    assert ConvWorkspaces(model("xyw@1", "zero", choose=(one, other, other)))(call()).transient_bytes == ()
    assert ConvWorkspaces(model("xyw@1", "zero", choose=(one, other)))(call()).transient_bytes == (copies,)
    assert ConvWorkspaces(model("xyw@1+more"))(call()).transient_bytes == (copies + MIB,)
    assert ConvWorkspaces(model(OTHER))(call()).transient_bytes == (2 * copies,)


def test_memory_that_a_benchmark_tries_is_distinguished_from_memory_that_it_keeps() -> None:
    tried = call(flags=("tf32", "benchmark"))
    workspaces = ConvWorkspaces.from_rows([row(mode="benchmark")], model("zero"))
    assert workspaces(tried).trial_bytes == 12_245
    assert workspaces(tried).transient_bytes == ()
    assert workspaces(call()).trial_bytes == 0


# Layers of common nets with what an H200 took for them.
KNOWN = [
    (call(image=(64, 128, 56, 56), weight=(256, 128, 3, 3), output=(64, 256, 56, 56), dtype="bfloat16"), 154_730_643),
    (call("conv_weight_grad", (64, 512, 36, 36), (512, 512, 3, 3), (64, 512, 36, 36), flags=()), 802_160_640),
    (call("conv", (16, 512, 28, 28), (512, 512, 3, 3), (16, 512, 28, 28)), 77_595_055),
    (call("conv", (256, 192, 28, 28), (48, 192, 3, 3), (256, 48, 28, 28), flags=("channels_last",)), 193_007_632),
]  # fmt: skip


@pytest.mark.parametrize(("made", "measured"), KNOWN)
def test_the_shipped_model_is_near_what_was_measured(made: Call, measured: int) -> None:
    assert sum(shipped_convolutions()(made).transient_bytes) == pytest.approx(measured, rel=0.05)


def test_the_shipped_model_extrapolates_a_layer_to_an_unmeasured_batch() -> None:
    """Copies of image, output and weight: the batch changes all but the last of them."""
    made = call(image=(88, 128, 56, 56), weight=(256, 128, 3, 3), output=(88, 256, 56, 56), dtype="bfloat16")
    assert shape(made) not in dict(shipped_model().call.measured)
    assert sum(shipped_convolutions()(made).transient_bytes) == pytest.approx(tensor_bytes(shape(made)), rel=0.05)


def test_the_shipped_file_is_small_and_whole() -> None:
    data = SHIPPED.read_bytes()
    assert len(data) < 3 * MIB
    found = msgspec.json.decode(gzip.decompress(data), type=ConvModel)
    count = len(features(shape(call())))
    for learnt in (found.call, found.trial):
        assert learnt.choose
        for tree in (*learnt.choose, *learnt.more, *learnt.other):
            assert len(tree.feature) == len(tree.threshold) == len(tree.right)
            assert max(tree.feature) < count
        answers = {tree.threshold[at] for tree in learnt.choose for at, asked in enumerate(tree.feature) if asked < 0}
        assert answers <= set(range(len(learnt.formulas)))


def test_the_replay_gets_a_block_for_a_convolution_and_none_for_what_has_no_rule() -> None:
    workspaces = card_workspaces(ConvWorkspaces.from_rows([row()], model("zero")), {})
    assert workspaces(call()).transient_bytes == (12_245,)
    assert workspaces(Call(op="blas", dtype="float32")) == NO_SCRATCH


def test_a_calibrated_card_brings_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "a-card.json"
    constants.save(constants.CardConstants(gpu="A card"), [dict(row())], file)
    assert convolutions_of(file)(call()).transient_bytes == (12_245,)
    assert convolutions_of(tmp_path / "none.json")(call()) == shipped_convolutions()(call())
