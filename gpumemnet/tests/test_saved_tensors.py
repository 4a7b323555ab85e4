"""The arithmetic behind GPUMemNet's features: what each layer keeps, worked out by hand."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer
from carma.trial.layers.kinds import kind_of
from gpumemnet.serving.features import FEATURES, PLACE, SETTINGS, TOKEN, features

BATCH = 1024
LEAST_MIB = 1e-3


def told(described: Described, name: str) -> float:
    """A size, as it was before its logarithm."""
    return float(2.0 ** float(features(described).scalars[PLACE[name]]) - 1.0)


def kept(described: Described) -> list[float]:
    """MiB of each layer, for the backward pass."""
    logs = features(described).tokens[:, TOKEN.index("kept_mib")].astype(np.float64)
    return [round(float(mib), 3) for mib in np.exp2(logs) - LEAST_MIB]


def linear(into: int, out: int, *rows: int) -> Layer:
    return Layer(kind="Linear", output=(*(rows or (BATCH,)), out), parameters=into * out)


def same(kind: str, like: Layer, *, inplace: bool = False) -> Layer:
    return Layer(kind=kind, output=like.output, inplace=inplace)


def conv(into: int, out: int, side: int, batch: int = 8) -> Layer:
    """Three by three, without a bias."""
    return Layer(kind="Conv2d", output=(batch, out, side, side), parameters=9 * into * out)


def model(*layers: Layer, **changed: object) -> Described:
    base = Described(layers=layers, batch=BATCH, input=(BATCH, 512), optimizer="SGD", optimizer_slots=0)
    return replace(base, **changed)


def chain(function: str, *, inplace: bool = False, **changed: object) -> Described:
    """2 MiB go in, 4 MiB lie between the two linear layers."""
    first = linear(512, 1024)
    return model(first, same(function, first, inplace=inplace), linear(1024, 256), **changed)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("ReLU", [2, 4, 0]),  # its output, which is the next one's input
        ("Tanh", [2, 4, 0]),
        ("Sigmoid", [2, 4, 0]),
        ("GELU", [2, 4, 4]),  # its input; the next one keeps its own
        ("SiLU", [2, 4, 4]),
        ("Flatten", [2, 0, 4]),  # a view; the linear layer keeps what is seen through it
    ],
)
def test_a_function_keeps_its_input_or_its_output(function: str, expected: list[float]) -> None:
    assert kept(chain(function)) == expected


def test_a_dropout_keeps_a_mask_of_bytes() -> None:
    first, _, last = chain("ReLU").layers
    assert kept(model(first, same("ReLU", first), same("Dropout", first), last)) == [2, 4, 1, 4]


@pytest.mark.parametrize("kind", ["StochasticDepth", "DropPath", "SwinDropPath"])
def test_what_drops_whole_samples_keeps_no_mask_of_their_size(kind: str) -> None:
    first, _, last = chain("ReLU").layers
    assert kept(model(first, same("ReLU", first), same(kind, first), last)) == [2, 4, 0, 4]


def test_a_function_that_works_in_place_keeps_its_output() -> None:
    assert kept(chain("LeakyReLU")) == [2, 4, 4]
    assert kept(chain("LeakyReLU", inplace=True)) == [2, 4, 0]
    assert kept(chain("SiLU", inplace=True)) == [2, 4, 4]  # for the backward pass it copies its input first
    assert told(chain("ReLU", inplace=True), "output_inplace") == pytest.approx(BATCH * 1024, rel=1e-3)
    assert told(chain("ReLU"), "output_inplace") == pytest.approx(0.0, abs=1e-6)


def test_functions_that_are_no_modules_are_counted_between_linear_layers() -> None:
    first, second = linear(512, 1024), linear(1024, 256)
    between = kept(model(first, second))
    assert between[0] > 2 + 2
    assert sum(between) < sum(kept(chain("GELU"))) + 0.001


def test_a_bias_is_not_an_input() -> None:
    layers = chain("ReLU").layers
    biased = replace(layers[2], parameters=1024 * 256 + 256)
    assert kept(model(layers[0], layers[1], biased)) == [2, 4, 0]


def test_under_autocast_products_keep_half_and_a_copy_of_their_weights() -> None:
    assert kept(chain("ReLU", autocast="bfloat16")) == [1 + 1, 2, 0.5]


def test_in_half_precision_all_is_half() -> None:
    assert kept(chain("ReLU", dtype="bfloat16")) == [1, 2, 0]
    assert told(chain("ReLU", dtype="float16"), "resting_mib") == pytest.approx(1.5, abs=0.01)


def test_max_pooling_keeps_its_input_and_where_the_largest_stood() -> None:
    first, pooled, last = conv(3, 64, 112), Layer(kind="MaxPool2d", output=(8, 64, 56, 56)), conv(64, 64, 56)
    images: dict[str, object] = {"batch": 8, "input": (8, 3, 112, 112)}
    large, small = (prod(each.output) * 4 / 2**20 for each in (first, pooled))
    assert (large, small) == (24.5, 6.125)
    entered = round(8 * 3 * 112 * 112 * 4 / 2**20, 3)
    assert kept(model(first, pooled, last, **images)) == [entered, large + 2 * small, small]
    with_relu = model(first, same("ReLU", first), pooled, last, **images)
    assert kept(with_relu) == [entered, large, 2 * small, small]


def test_a_mean_keeps_nothing() -> None:
    first = conv(3, 64, 56)
    mean = Layer(kind="AdaptiveAvgPool2d", output=(8, 64, 1, 1))
    found = kept(model(first, same("ReLU", first), mean, batch=8, input=(8, 3, 56, 56)))
    assert found[2] == 0.0


def test_joined_branches_follow_from_the_weights() -> None:
    first, second = conv(3, 32, 64), conv(32, 32, 64)
    images: dict[str, object] = {"batch": 8, "input": (8, 3, 64, 64)}

    def third(into: int) -> Described:
        return model(first, same("ReLU", first), second, same("ReLU", second), conv(into, 32, 64), **images)

    one = 8 * 32 * 64 * 64 * 4 / 2**20
    assert kept(third(32))[-1] == 0.0  # what the rectifier keeps
    assert kept(third(64))[-1] == 2 * one  # both in one tensor, which is new
    more = told(third(64), "inputs_batch") - told(third(32), "inputs_batch")
    assert more == pytest.approx(8 * 32 * 64 * 64, rel=1e-3)


def test_a_shortcut_takes_an_input_that_another_layer_keeps() -> None:
    """Of a ResNet: a convolution of one place beside a larger one."""
    begin, first = conv(3, 64, 56), conv(64, 32, 56)
    aside = Layer(kind="Conv2d", output=first.output, parameters=64 * 32)
    layers = (begin, same("BatchNorm2d", begin), first, same("ReLU", first), aside)
    found = kept(model(*layers, batch=8, input=(8, 3, 56, 56)))
    assert found[2] == 8 * 64 * 56 * 56 * 4 / 2**20
    assert found[4] == 0.0


def test_weights_that_are_shared_are_counted_once() -> None:
    layers = (Layer(kind="Embedding", output=(4, 64, 256), parameters=256_000), linear(256, 1000, 4, 64))
    words: dict[str, object] = {"batch": 4, "input": (4, 64)}
    apart, tied = model(*layers, **words), model(*layers, **words, parameters=256_000)
    for name in ("resting_mib", "gradients_mib"):
        assert told(tied, name) == pytest.approx(256_000 * 4 / 2**20, rel=1e-3)
        assert told(apart, name) == pytest.approx(2 * told(tied, name), rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "slots", "state", "temporaries"),
    [("SGD", 0, 0, 0), ("SGD", 1, 1, 1), ("Adam", 2, 2, 1), ("AdamW", 2, 2, 1), ("Adagrad", 1, 1, 2), ("", None, 2, 1)],
)
def test_an_optimizer_keeps_a_state_and_needs_room(
    optimizer: str, slots: int | None, state: int, temporaries: int
) -> None:
    found = chain("ReLU", optimizer=optimizer, optimizer_slots=slots)
    assert told(found, "resting_mib") == pytest.approx(3 * (1 + state), rel=1e-3)
    assert features(found).scalars[PLACE["slots"]] == state
    assert features(found).scalars[PLACE["temporaries"]] == temporaries


def attention(**changed: object) -> Described:
    """Queries, keys, values, and what follows: of 2 × 128 words of width 256."""
    layers = [linear(256, 256, 2, 128) for _ in range(4)]
    return model(*layers, **{"batch": 2, "input": (2, 128, 256), **changed})


def test_scores_that_are_written_out_count_for_each_head() -> None:
    assert told(attention(attention="eager", heads=8), "scores_mib") == pytest.approx(2 * 8 * 128 * 128 * 4 / 2**20)
    assert told(attention(attention="eager"), "scores_mib") == pytest.approx(2 * 4 * 128 * 128 * 4 / 2**20)  # of 64
    assert told(attention(attention="sdpa", heads=8), "scores_mib") == pytest.approx(0.0, abs=1e-6)
    many = {"heads": 128}
    assert told(attention(attention="eager", **many), "guess_mib") > told(attention(**many), "guess_mib") + 2 * 16


def blocks(count: int, **changed: object) -> Described:
    """Of a transformer, without its attention; 8 × 512 words of width 256."""
    wide, narrow = linear(256, 1024, 8, 512), linear(1024, 256, 8, 512)
    layers = (
        same("LayerNorm", narrow),
        linear(256, 256, 8, 512),
        same("LayerNorm", narrow),
        wide,
        same("GELU", wide),
        narrow,
    )
    return model(*layers * count, **{"batch": 8, "input": (8, 512, 256), **changed})


def test_with_checkpointing_one_block_is_there_in_full() -> None:
    plain, again = blocks(8), blocks(8, checkpointing=True)
    one = sum(kept(plain)[:6])
    assert one < sum(kept(again)) < 0.5 * sum(kept(plain))
    assert told(again, "guess_mib") < 0.6 * told(plain, "guess_mib")
    assert sum(kept(blocks(16, checkpointing=True))) < sum(kept(again)) + 8 * one / 4  # others leave what went in


def test_with_checkpointing_stems_and_heads_are_kept() -> None:
    """Only what repeats itself is computed again: of each block what went in stays, and one is there in full."""
    stem, head = linear(512, 256, 8, 512), linear(256, 4096, 8, 512)
    inner = blocks(4).layers
    plain, again = (
        kept(model(stem, *inner, inner[0], head, batch=8, input=(8, 512, 512), checkpointing=on))
        for on in (False, True)
    )
    went_in = 8 * 512 * 256 * 4 / 2**20
    assert again[0] == plain[0] > 0
    assert again[-2:] == plain[-2:]
    assert sum(again[1:-2]) == pytest.approx(4 * went_in + sum(plain[1:7]), rel=1e-3)
    assert sum(each > 0 for each in again[1:-2]) == 4


def test_a_loss_is_no_layer() -> None:
    plain = chain("ReLU")
    with_loss = replace(plain, layers=(*plain.layers, Layer(kind="CrossEntropyLoss", output=(1,))))
    assert features(with_loss).kinds.tolist() == features(plain).kinds.tolist()
    np.testing.assert_array_equal(features(with_loss).scalars, features(plain).scalars)


def test_inputs_in_a_summary_take_precedence() -> None:
    layers = chain("ReLU").layers
    other = replace(layers[2], inputs=((BATCH, 2048),))
    assert kept(model(layers[0], layers[1], other)) == [2, 4, 8]


KINDS_OF = {
    "linear": "Linear NonDynamicallyQuantizableLinear FalconLinear Dense",
    "convolution": "Conv1d Conv2d Conv3d Conv2dSame ScaledStdConv2d ParametrizedConv1d Conv3DSimple Conv2D Conv",
    "grouped": "DepthwiseConv2D DepthwiseConv1D",
    "transposed": "ConvTranspose2d ConvTranspose1d Conv2DTranspose Conv1DTranspose",
    "batch_norm": "BatchNorm1d BatchNorm2d SyncBatchNorm BatchNormAct2d BatchNormalization FrozenBatchNorm2d",
    "norm": "LayerNorm GroupNorm RMSNorm LlamaRMSNorm T5LayerNorm DebertaLayerNorm LayerNorm2d GroupNorm1 "
    "ConvNextV2LayerNorm LayerNormalization Qwen2RMSNorm Gemma2RMSNorm LocalResponseNorm",
    "rectifier": "ReLU Sigmoid Tanh",
    "activation": "GELU SiLU SiLUActivation GELUActivation NewGELUActivation QuickGELUActivation BloomGelu GELUTanh "
    "ReLU6 LeakyReLU PReLU ELU SELU CELU Mish Hardswish Hardsigmoid Softplus Softsign Hardtanh GLU Tanhshrink",
    "dropout": "Dropout Dropout2d AlphaDropout StochasticDepth DropPath SwinDropPath SpatialDropout2D",
    "pooling": "AvgPool2d AdaptiveAvgPool2d FastAdaptiveAvgPool GlobalAveragePooling2D AveragePooling2D",
    "max_pooling": "MaxPool2d MaxPool1d AdaptiveMaxPool2d MaxPooling2D GlobalMaxPooling1D LastLevelMaxPool",
    "embedding": "Embedding EmbeddingBag OPTLearnedPositionalEmbedding GemmaTextScaledWordEmbedding ViTEmbeddings",
    "attention": "MultiheadAttention MultiHeadAttention ShiftedWindowAttention ShiftedWindowAttentionV2 "
    "RelativePositionalMultiHeadAttention GroupedQueryAttention XLNetRelativeAttention",
    "softmax": "Softmax LogSoftmax Softmax2d",
    "shape": "Flatten Identity Permute Reshape ZeroPad2d LlamaRotaryEmbedding Unfold InputLayer ChannelShuffle",
    "upsampling": "Upsample UpsamplingBilinear2d PixelShuffle Fold",
    "merge": "Add Concatenate Multiply FloatFunctional",
    "recurrent": "LSTM GRU RNN LSTMCell GRUCell SimpleRNN Bidirectional ConvLSTM2D",
    "conv1d": "Conv1D",
    "other": "CNBlock LayerScale MixtralExperts VisionTransformer",
}


@pytest.mark.parametrize("kind", KINDS_OF)
def test_classes_that_are_common_are_known_by_what_they_do(kind: str) -> None:
    names = KINDS_OF[kind].split()
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


widths = some.sampled_from((16, 64, 256, 1000))
functions = some.sampled_from(("ReLU", "GELU", "LeakyReLU", "Dropout", "LayerNorm", "Softmax", "Flatten", "Weird"))
trained = some.fixed_dictionaries(
    {
        "autocast": some.sampled_from(("", "bfloat16")),
        "dtype": some.sampled_from(("float32", "bfloat16")),
        "checkpointing": some.booleans(),
        "attention": some.sampled_from(("", "sdpa", "eager")),
        "optimizer": some.sampled_from(("", "SGD", "Adam", "Adagrad")),
        "optimizer_slots": some.sampled_from((None, 0, 1, 2)),
    }
)


@some.composite
def networks(draw: some.DrawFn) -> list[Layer]:
    """For one sample: rows of some words, and at least one layer with weights."""
    words, width = draw(some.sampled_from((1, 7, 128))), draw(widths)
    layers = [Layer(kind="Linear", output=(1, words, width), parameters=width * width)]
    for _ in range(draw(some.integers(0, 12))):
        if draw(some.booleans()):
            out = draw(widths)
            layers.append(Layer(kind="Linear", output=(1, words, out), parameters=width * out + out))
            width = out
        else:
            layers.append(Layer(kind=draw(functions), output=(1, words, width), inplace=draw(some.booleans())))
    return layers


def of_batch(layers: list[Layer], batch: int, changed: dict[str, object]) -> Described:
    sized = [replace(layer, output=(batch, *layer.output[1:])) for layer in layers]
    return model(*sized, **{"batch": batch, "input": (batch, *layers[0].output[1:]), **changed})


@settings(deadline=None)
@given(networks(), some.sampled_from((1, 3, 64, 1000)), trained)
def test_numbers_are_finite_and_more_samples_never_keep_less(
    layers: list[Layer], batch: int, changed: dict[str, object]
) -> None:
    small, large = (of_batch(layers, count, changed) for count in (batch, 2 * batch))
    found = features(small)
    assert np.isfinite(found.scalars).all()
    assert np.isfinite(found.tokens).all()
    assert found.scalars.shape == (len(FEATURES),)
    sizes = [place for name, place in PLACE.items() if name not in (*SETTINGS, "cos_function", "sin_function")]
    assert (found.scalars[sizes] >= 0).all()
    for name in ("kept_mib", "scores_mib", "activations_batch"):
        assert told(large, name) >= 0.999 * told(small, name), name
    assert told(small, "guess_mib") >= 0.999 * told(
        small, "allocated_mib"
    )  # what is reserved holds all that is allocated
    assert found.family == features(large).family


def gated(function: str, end: str) -> Described:
    """An image of 4 MiB, squeezed and excited, and then `end` takes the product."""
    image, figures = (8, 64, 46, 46), (8, 64, 1, 1)
    last = Layer(kind=end, output=image, inputs=(image,), parameters=9 * 64 * 64 if end == "Conv2d" else 0)
    return model(
        conv(64, 64, 46),
        Layer(kind="BatchNorm2d", output=image, parameters=128),
        *((Layer(kind=function, output=image),) if function else ()),
        Layer(kind="AdaptiveAvgPool2d", output=figures),
        Layer(kind="Conv2d", output=(8, 4, 1, 1), parameters=256),
        Layer(kind="ReLU", output=(8, 4, 1, 1)),
        Layer(kind="Conv2d", output=figures, parameters=256),
        Layer(kind="Sigmoid", output=figures),
        last,
        batch=8,
        input=(8, 64, 46, 46),
    )


@pytest.mark.parametrize(
    ("function", "end", "expected"),
    [
        ("", "Conv2d", 8 * 64 * 46 * 46 * 4 / 2**20),
        ("", "ReLU", 8 * 64 * 46 * 46 * 4 / 2**20),  # of a residual block: behind the sum
        ("SiLU", "Conv2d", 8 * 64 * 46 * 46 * 4 / 2**20),
        ("ReLU", "Conv2d", 0),  # it has kept its output
    ],
)
def test_the_other_factor_of_a_gate_is_kept(function: str, end: str, expected: float) -> None:
    described = gated(function, end)
    mean = next(place for place, layer in enumerate(described.layers) if layer.kind.startswith("Adaptive"))
    assert kept(described)[mean] == pytest.approx(expected, abs=0.01)


IMAGE = (8, 64, 46, 46)
IMAGE_MIB = 8 * 64 * 46 * 46 * 4 / 2**20


def test_the_product_of_a_gate_is_a_tensor_of_its_own() -> None:
    """A layer before the gate took as much, which does not make it the same."""
    described = gated("ReLU", "Conv2d")
    assert kept(described)[-1] == pytest.approx(IMAGE_MIB, abs=0.01)


@pytest.mark.parametrize(("told", "share"), [("GELU", 1.0), ("ReLU", 0.0)])
def test_the_heads_activation_determines_the_function_of_images(told: str, share: float) -> None:
    norm = Layer(kind="BatchNorm2d", output=IMAGE, parameters=128)
    head = (Layer(kind="Linear", output=(8, 64), parameters=64 * 64), Layer(kind=told, output=(8, 64)))
    pool = Layer(kind="AdaptiveAvgPool2d", output=(8, 64, 1, 1))
    described = model(conv(64, 64, 46), norm, conv(64, 64, 46), pool, *head, batch=8, input=IMAGE)
    assert kept(described)[1] == pytest.approx((1 + share) * IMAGE_MIB, abs=0.01)  # its input, and perhaps its output
