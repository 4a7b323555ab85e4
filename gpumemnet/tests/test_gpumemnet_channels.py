"""Which place of a shape GPUMemNet takes for the channels: of images the second or the last, as the layer has it."""

from __future__ import annotations

import numpy as np
import pytest

from carma.trial.layers.description import Layer
from gpumemnet.serving.features import TOKEN, features
from gpumemnet_fixtures.allocator_watch import layer, model


def channels(*layers: Layer) -> list[float]:
    logs = features(model(*layers, input=(8, 3, 64, 64))).tokens[:, TOKEN.index("channels")]
    return [round(float(each)) for each in np.exp2(logs.astype(np.float64))]


def test_linear_layers_and_their_norms_have_their_channels_in_the_last_place() -> None:
    """Of ConvNeXt, and of Swin, as tables have them."""
    first, last = (8, 96, 16, 16), (8, 16, 16, 96)
    wide = Layer(kind="Linear", output=(8, 16, 16, 384), parameters=97 * 384)
    assert channels(
        Layer(kind="Conv2d", output=first, parameters=49 * 96, attributes={"groups": "96"}),
        Layer(kind="LayerNorm", output=last, parameters=192),
        wide,
        layer("GELU", *wide.output),
        Layer(kind="Linear", output=last, parameters=385 * 96),
        Layer(kind="Dropout", output=last),
        Layer(kind="Permute", output=first),
        Layer(kind="LayerNorm2d", output=first, parameters=192),
        Layer(kind="Conv2d", output=(8, 192, 8, 8), parameters=4 * 96 * 192),
        Layer(kind="ReLU", output=(8, 192, 8, 8)),
    ) == [96, 96, 384, 384, 96, 96, 96, 96, 192, 192]


def test_the_input_of_a_linear_layer_of_images_is_its_last_size() -> None:
    last = (8, 16, 16, 96)
    layers = (
        Layer(kind="Conv2d", output=(8, 96, 16, 16), parameters=48 * 96),
        Layer(kind="LayerNorm", output=last, parameters=192),
        Layer(kind="Linear", output=(8, 16, 16, 384), parameters=97 * 384),
    )
    logs = features(model(*layers, input=(8, 3, 64, 64))).tokens[:, TOKEN.index("kept_mib")]
    assert np.exp2(float(logs[2])) == pytest.approx(8 * 16 * 16 * 96 * 4 / 2**20, rel=0.01)


def test_of_keras_the_channels_of_images_are_in_the_second_place() -> None:
    image = (8, 96, 16, 16)
    assert channels(
        Layer(kind="Conv2D", output=image, parameters=49 * 96),
        Layer(kind="LayerNormalization", output=image, parameters=192),
        Layer(kind="Dense", output=(8, 384, 16, 16), parameters=97 * 384),
    ) == [96, 96, 384]
