"""cuDNN's workspaces for the convolutions of a list of layers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer
from carma.trial.replay.conv_shapes import TF32, ConvShape
from carma.trial.replay.conv_workspaces import shipped_convolutions
from gpumemnet.serving.conv_scratch import NONE, scratch_of
from gpumemnet.serving.features import PLACE, features
from gpumemnet.summaries import read_text

BATCH, SIDE = 32, 112
ATTRIBUTES = {"kernel_size": "(3, 3)", "stride": "(1, 1)", "padding": "(1, 1)"}


def conv(**changed: object) -> Layer:
    image = (BATCH, 64, SIDE, SIDE)
    base = Layer(kind="Conv2d", output=image, inputs=(image,), parameters=9 * 64 * 64, attributes=ATTRIBUTES)
    return replace(base, **changed)


def network(*layers: Layer, **changed: object) -> Described:
    base = Described(
        layers=layers, batch=BATCH, input=(BATCH, 64, SIDE, SIDE), optimizer="SGD", optimizer_slots=0
    )  # fmt: skip
    return replace(base, **changed)


def measured(direction: int) -> int:
    image, ones = (BATCH, 64, SIDE, SIDE), (1, 1)
    return shipped_convolutions().scratch_bytes(
        ConvShape(direction, TF32, 4, False, False, False, image, (64, 64, 3, 3), image, ones, ones, ones, 1)
    )


def test_each_direction_is_asked_for() -> None:
    asked = tuple(map(measured, range(3)))
    assert scratch_of(network(conv())) == [asked]
    assert max(asked) > 0


@pytest.mark.parametrize(
    "layer",
    [
        conv(attributes={}),
        conv(attributes={}, inputs=()),
        conv(attributes={}, parameters=9 * 64 * 64 + 64),
        conv(attributes={"kernel_size": "3", "stride": "1", "padding": "1"}),
    ],
    ids=["sizes and weights", "weights alone", "with a bias", "one number"],
)
def test_what_a_summary_does_not_tell_follows_from_the_weights(layer: Layer) -> None:
    assert scratch_of(network(layer)) == scratch_of(network(conv()))


def test_a_layer_that_is_called_again_has_no_weights_to_tell_its_kernel() -> None:
    """torchinfo's `(recursive)`: its weights stand in the row of the first call."""
    assert scratch_of(network(conv(attributes={}, parameters=0))) == [NONE]


def test_weights_that_fit_no_kernel_have_no_workspace() -> None:
    assert scratch_of(network(conv(attributes={}, parameters=12_345))) == [NONE]


def test_one_dimension_is_run_as_two() -> None:
    signal = (BATCH, 64, 4096)
    layer = Layer(kind="Conv1d", output=signal, inputs=(signal,), parameters=3 * 64 * 64)
    flat = replace(layer, kind="Conv2d", output=(BATCH, 64, 1, 4096), inputs=((BATCH, 64, 1, 4096),))
    told = {"kernel_size": "(1, 3)", "stride": "(1, 1)", "padding": "(0, 1)"}
    assert scratch_of(network(layer)) == scratch_of(network(replace(flat, attributes=told)))


def test_a_shortcut_takes_what_fits_to_its_weights() -> None:
    """As a table lists it: behind the block's other layers, and without a word of its input."""
    whole, half = (BATCH, 64, SIDE, SIDE), (BATCH, 128, SIDE // 2, SIDE // 2)
    first = conv(attributes={}, inputs=(), output=half, parameters=9 * 64 * 128)
    norm = Layer(kind="BatchNorm2d", output=half, parameters=256)
    aside = conv(attributes={}, inputs=(), output=half, parameters=64 * 128)
    told = replace(aside, inputs=(whole,))
    assert scratch_of(network(first, norm, aside)) == scratch_of(network(first, norm, told))
    assert scratch_of(network(told))[0] != NONE


def test_a_transposed_convolution_is_the_other_direction_of_a_plain_one() -> None:
    small, large = (BATCH, 128, 56, 56), (BATCH, 64, 112, 112)
    told = {"kernel_size": "(2, 2)", "stride": "(2, 2)", "padding": "(0, 0)"}
    plain = conv(inputs=(large,), output=small, parameters=4 * 64 * 128, attributes=told)
    turned = conv(kind="ConvTranspose2d", inputs=(small,), output=large, parameters=4 * 64 * 128, attributes=told)
    forward, back, weights = scratch_of(network(plain))[0]
    assert len({forward, back, weights}) > 1
    assert scratch_of(network(turned)) == [(back, forward, weights)]
    unknown = replace(turned, attributes={"stride": "(2, 2)", "padding": "(0, 0)"})
    assert scratch_of(network(unknown)) == [(back, forward, weights)]


def test_other_layers_take_none_and_losses_are_none() -> None:
    found = scratch_of(network(conv(), Layer(kind="ReLU", output=conv().output), Layer(kind="CrossEntropyLoss")))
    assert [each == NONE for each in found] == [False, True]


@pytest.mark.parametrize("direction", range(3))
def test_what_is_taken_is_reserved(direction: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two layers takes far more than all tensors together, in one direction only. In the second step a
    tensor may stand in the middle of it, as in torch: then there are two."""
    two, large = network(conv(), conv()), 1 << 36
    asked = tuple(large if place == direction else 0 for place in range(3))

    def reserved_bytes(scratch: tuple[int, ...]) -> float:
        monkeypatch.setattr("gpumemnet.serving.tensor_sizes.scratch_of", lambda _: [NONE, scratch])
        return float(2 ** features(two).scalars[PLACE["guess_mib"]].astype(float) - 1) * 2**20

    assert reserved_bytes(NONE) < large / 10
    assert large <= reserved_bytes(asked) * 1.001 < 2.1 * large


def test_what_tensors_take_grows_with_the_batch() -> None:
    """What is reserved need not, as the page says: whether a freed block fits the next request hangs on both sizes."""
    text = "Net(\n" + "".join(
        f"  ({place}): Conv2d({taken}, {given}, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))\n"
        for place, (taken, given) in enumerate(((3, 64), (64, 128), (128, 256), (256, 512)))
    )
    found = []
    for batch in range(8, 80, 4):
        described = read_text(text + ")", batch=batch, sample=(3, 224, 224)).described
        found.append(float(features(described).scalars[PLACE["allocated_mib"]]))
    assert found == sorted(found)
    assert found[0] < found[-1]
